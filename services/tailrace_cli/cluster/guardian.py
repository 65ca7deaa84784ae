"""The last process of a local cluster: ends everything when the command that started it is gone.

A service ends by itself when its parent dies, unless it hangs or drains for long. The guardian hears of
every process of the cluster on its standard input (`+pid`, `-pid`). At the end of that input it sends
SIGTERM to those that are left and SIGKILL to their process groups a second later. Once these are gone
it deletes the shared memory that no process holds. It runs this file alone, with the standard library.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TERM_S = 1.0
KILLED_S = 10.0  # for the end of killed processes; one that waits for a device may never end
_POLL_S = 0.02
_CLOSE_S = 5.0
_LOCK = "lock"  # in a folder of staged weights


class Guardian:
    """The guardian's process, as the command sees it."""

    def __init__(self, run: str) -> None:
        # Without a writable /dev/shm processes share memory in the temporary folder.
        command = [sys.executable, "-I", __file__, run, "/dev/shm", tempfile.gettempdir()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={}, cwd="/")

    def watch(self, pid: int) -> None:
        """Have it end this process, the first of its group, with the cluster."""
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Tell it that the process has ended."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Let it end what is left, and wait a while for that; it goes on without us."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # much shared memory takes its time
            self._process.wait(_CLOSE_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: the kernel's signals remain
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main(run: str, memory: Sequence[Path]) -> None:
    """Wait for the end of standard input, then end what is left."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    end(running)
    for folder in memory:
        sweep(run, folder)


def end(groups: set[int]) -> None:
    """End process groups: SIGTERM to their first processes, then SIGKILL to all of each.

    Returns when none runs: a killed process keeps its memory and its locks for a while.
    """
    left = {group for group in groups if _sent(os.kill, group, signal.SIGTERM)}
    give_up_s = time.monotonic() + TERM_S
    while left and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
        left = {group for group in left if _sent(os.kill, group, 0)}
    killed = {group for group in groups if _sent(os.killpg, group, signal.SIGKILL)}
    give_up_s = time.monotonic() + KILLED_S
    while killed & _groups() and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)


def _groups() -> set[int]:
    """Process groups in which a process runs, and no mere zombie; none on systems without /proc."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X"):
                found.add(int(group))
    return found


def _sent(how: Callable[[int, int], None], target: int, number: int) -> bool:
    """Tell whether somebody was there."""
    try:
        how(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def sweep(run: str, memory: Path) -> None:
    """Delete the run's segments and folders of staged weights that no living process has locked."""
    for hidden in ("", "."):
        for path in memory.glob(f"{hidden}tailrace.{run}.*"):
            with _unlocked(path) as is_free:
                if is_free:
                    path.unlink(missing_ok=True)
        for folder in memory.glob(f"{hidden}tailrace-weights-*"):
            with _unlocked(folder / _LOCK) as is_free:
                if is_free:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file of ours; False if it is another's, locked or gone."""
    try:
        with path.open("rb") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield is_ours
    except OSError:
        yield False


if __name__ == "__main__":
    main(sys.argv[1], [*map(Path, sys.argv[2:])])
