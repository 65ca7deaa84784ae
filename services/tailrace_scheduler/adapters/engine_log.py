"""`engines.jsonl`: reports of inference servers, for `tailrace simulate calibrate`.

The file is no state of the run: a line that the disk refuses is left out, with one warning.
"""

from pathlib import Path

import msgspec

from tailrace.log import get_logger
from tailrace_protos.control import ServerStatus
from tailrace_scheduler.adapters.run_files import LineFile
from tailrace_scheduler.ports import DiskFullError

log = get_logger(__name__)
INTERVAL_S = 2.0
SILENT_S = 3600.0  # one that comes back gets one line more
LINES_AT_INTERVAL = 20_000  # then the interval doubles, and again, so that days stay small


class EngineLog:
    """Keeps a report of each server at every interval in which it made steps."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / "engines.jsonl")
        self._kept: dict[str, ServerStatus] = {}  # newest line of each server of the last hour
        self._num_lines = -1  # those of earlier schedulers are not counted yet
        self._is_refused = False

    def heard(self, status: ServerStatus) -> None:
        """Takes a heartbeat; of most it keeps nothing."""
        if self._num_lines < 0:
            self._num_lines = sum(1 for _ in self._file.recover())
        before = self._kept.get(status.server_id)
        if before is not None and before.incarnation == status.incarnation:
            interval_s = INTERVAL_S * 2 ** (self._num_lines // LINES_AT_INTERVAL)
            is_early = status.heartbeat_unix_s - before.heartbeat_unix_s < interval_s
            if is_early or status.num_steps == before.num_steps:
                return
        try:
            self._file.append([msgspec.json.encode(status)])
        except DiskFullError as error:
            if not self._is_refused:
                log.warning("a report of an inference server is not kept", reason=str(error))
            self._is_refused = True
            return
        self._is_refused = False
        if before is None:
            self._forget_silent(status.heartbeat_unix_s)
        self._kept[status.server_id] = status
        self._num_lines += 1

    def _forget_silent(self, unix_s: float) -> None:
        """Drop servers without a line for long: every pod may have another name."""
        for server_id, status in list(self._kept.items()):
            if unix_s - status.heartbeat_unix_s > SILENT_S:
                del self._kept[server_id]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
