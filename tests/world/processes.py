"""A service in a process of its own, which a test kills and starts again on the same files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tailrace.config import Endpoints

ENDED_WITHIN_S = 120.0  # deadline for the end of a child after its parent's


def environment(endpoints: Endpoints, folder: Path) -> dict[str, str]:
    """Environment of a service that uses these servers and keeps its state in `folder`."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "TAILRACE_NATS_URL": endpoints.nats_url,
        "TAILRACE_REDIS_URL": endpoints.redis_url,
        "TAILRACE_HOST_ID": endpoints.host_id,
        "TAILRACE_METRICS_PORT": "0",
        "TAILRACE_STATE_DIR": str(folder / "state"),
        "TAILRACE_LOG": "json",
    }


@dataclass
class ServiceProcess:
    """Process of one service; its output is appended to `log_path`."""

    service: str
    config: Path
    environment: Mapping[str, str]
    log_path: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    prefix: tuple[str, ...] = ()  # words of another command that becomes this one

    def start(self) -> None:
        argv = [
            *self.prefix,
            sys.executable,
            "-m",
            "tailrace.start",
            f"tailrace_{self.service}",
            "--config",
            str(self.config),
        ]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, *self.arguments], env=self.environment, stdout=log, stderr=log
            )

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process; fails before `start`."""
        assert self.process is not None
        return self.process

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        """SIGKILL, as a crash would; does nothing to a process that has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, timeout_s: float = 200.0) -> int:
        """SIGTERM; returns the exit code."""
        self.running.send_signal(signal.SIGTERM)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = 200.0) -> int:
        """Wait for the end; returns the exit code."""
        return self.running.wait(timeout_s)

    async def ended_async(self, timeout_s: float = 200.0) -> int:
        """The same while the loop goes on, in which the test's own services run."""
        return await asyncio.to_thread(self.ended, timeout_s)


def is_alive(process: psutil.Process | int) -> bool:
    """Whether it (or its number) runs; false of a zombie, and of one that ends at that moment."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each that has not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def handles(processes: Iterable[psutil.Process]) -> Iterator[dict[int, int]]:
    """Handles (pidfd) of living processes, to their ids; the kernel marks each at its process's end."""
    found = {os.pidfd_open(process.pid): process.pid for process in processes}
    try:
        yield found
    finally:
        for handle in found:
            os.close(handle)


def outlasting(found: Mapping[int, int], deadline_s: float) -> set[int]:
    """Ids of the processes that have not ended at `deadline_s` of the monotonic clock.

    The kernel holds the marks, so a process that ended counts as ended, however late this test runs.
    """
    left, ends = dict(found), select.poll()
    for handle in left:
        ends.register(handle, select.POLLIN)
    while left:
        remaining_s = max(0.0, deadline_s - time.monotonic())
        ended = ends.poll(1000 * remaining_s)
        for handle, _ in ended:
            ends.unregister(handle)
            del left[handle]
        if not ended and not remaining_s:
            break
    return set(left.values())
