"""Watch the run directory's disk: tell the user when it is full, mend nats-server once it has room.

Redis and every service wait and go on by themselves. nats-server does not: a stream that once could
not be written takes nothing until the server is started anew, so it is, as soon as there is room. Free
space is looked at, and nats-server's log, which tells of shortages shorter than a look's interval.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.5
FULL_BELOW_BYTES = 1 << 20
ROOM_FROM_BYTES = 16 << 20
RESTART_AT_MOST_EVERY_S = 5.0
NO_SPACE = b"no space left on device"


class DiskWatch:
    """Looks at one run directory; `restart_nats` is None where nats-server is not ours."""

    def __init__(
        self,
        run_dir: Path,
        nats_log: Path,
        restart_nats: Callable[[], None] | None,
        tell: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._nats_log = nats_log
        self._restart_nats = restart_nats
        self._tell = tell
        self._log_offset = nats_log.stat().st_size if nats_log.exists() else 0
        self._was_full = False

    async def run(self) -> None:
        """Look for ever, also while the run directory cannot be reached."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            with contextlib.suppress(OSError):
                if self.look():
                    await asyncio.sleep(RESTART_AT_MOST_EVERY_S)

    def look(self) -> bool:
        """Look once; True when the shortage is over and nats-server was started anew."""
        disk = os.statvfs(self._run_dir)
        free = disk.f_bavail * disk.f_frsize
        is_short = free < FULL_BELOW_BYTES or self._is_in_log()
        if is_short and not self._was_full:
            self._was_full = True
            self._tell(
                f"the disk of {self._run_dir} is full: free some space on it; nothing is lost, the run "
                "waits and goes on by itself"
            )
        if not self._was_full or free < ROOM_FROM_BYTES:
            return False
        self._was_full = False
        self._tell(f"the disk of {self._run_dir} has room again: {free >> 20} MiB")
        if self._restart_nats is not None:
            self._restart_nats()
        return True

    def _is_in_log(self) -> bool:
        """Tell whether nats-server has logged it since the last look."""
        if self._restart_nats is None or not self._nats_log.exists():
            return False
        with self._nats_log.open("rb") as file:
            file.seek(self._log_offset)
            fresh = file.read()
        self._log_offset += len(fresh)
        return NO_SPACE in fresh
