"""Log of this process as the place where the processes of an engine say why they do not start."""

import os
import re
import stat

_LOG = "/proc/self/fd/2"
_MOST_BYTES = 1 << 20
# vLLM: its engine core, or the process that looked at the model's class, has told why.
_IN_LOG = ("See root cause above", "check the logs for more details")
# An exception as Python or a logger ends its traceback, behind the logger's own words.
_EXCEPTION = re.compile(rb"^(?:.*[\])] )?((?:\w+\.)*\w+(?:Error|Exception|Exit): .+)$", re.MULTILINE)


class StartLog:
    """Lines that come into the log from now on; none where it is no file."""

    def __init__(self) -> None:
        found = os.stat(_LOG) if os.path.exists(_LOG) else None
        is_file = found is not None and stat.S_ISREG(found.st_mode)
        self._start = found.st_size if found is not None and is_file else -1

    def told(self, error: Exception) -> str:
        """Words of an error in one line; where it points to the log, the newest exception there."""
        words = " ".join(str(error).split())
        return (any(each in words for each in _IN_LOG) and self._cause()) or words

    def _cause(self) -> str:
        if self._start < 0:
            return ""
        with open(_LOG, "rb") as log:
            log.seek(self._start)
            found = _EXCEPTION.findall(log.read(_MOST_BYTES))
        return found[-1].decode(errors="replace").strip() if found else ""
