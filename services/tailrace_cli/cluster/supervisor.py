"""Child processes under supervision: logs, restarts with back-off, orderly ends.

Invariants: a child never outlives this process by more than two seconds (the kernel signals it when its
parent dies, and a guardian ends it); what children write is readable by their owner alone; a child
that ends by itself is started again, later each time, unless it says that its configuration is wrong
(exit code 2) or it fails too often, which fails the cluster: before it is ready, within a time, or
without progress of the run in between.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tailrace.config import ConfigError
from tailrace_cli.cluster.guardian import Guardian
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.servers import tail
from tailrace_cli.exit_codes import USER_ERROR, RunEndedError

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
_PR_SET_PDEATHSIG = 1
KILLED_S = 10.0  # for the end of a killed process
_CANNOT_START = 127  # as shells say it

_libc = ctypes.CDLL(None, use_errno=True)


class ServiceFailedError(RunEndedError):
    """A service cannot go on: `name`, its `exit_code`, and the end of its log in `log_tail`."""

    def __init__(self, name: str, exit_code: int, log_path: Path, how_often: str = "") -> None:
        self.name = name
        self.exit_code = exit_code
        self.log_tail = tail(log_path)
        if exit_code == USER_ERROR:
            last = self.log_tail.splitlines()[-1:] or ["(no message)"]
            message = f"{name}: {last[0].removeprefix('error: ')}"
        else:
            message = (
                f"{name} keeps failing ({told_end(exit_code)}), {how_often}; {log_path} ends:\n"
                f"{self.log_tail}"
            )
        super().__init__(message)


class _Failures:
    """Ends of one process, and the limits beyond which it is not started again."""

    def __init__(self, max_restarts: int, restart_window_s: float, max_failed_starts: int) -> None:
        self._max_restarts = max_restarts
        self._window_s = restart_window_s
        self._max_failed_starts = max_failed_starts
        self._times: deque[float] = deque()
        self._num_failed_starts = 0
        self.num_without_progress = 0

    @property
    def num_recent(self) -> int:
        """Ends within the window."""
        return len(self._times)

    @property
    def delay_s(self) -> float:
        """Time until the process is started again."""
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.num_recent - 1))

    def add(self, now_s: float, *, was_ready: bool, expects_progress: bool) -> str:
        """Count an end; returns how often, if that is too often."""
        self._times.append(now_s)
        while self._times[0] < now_s - self._window_s:
            self._times.popleft()
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        self.num_without_progress += 1
        limit = self._max_failed_starts
        if 0 < limit <= self._num_failed_starts:
            return f"{self._num_failed_starts} times in a row before it was ready"
        if expects_progress and 0 < limit <= self.num_without_progress:
            return f"{self.num_without_progress} times without a valid episode or step in between"
        if self.num_recent > self._max_restarts:
            return f"{self.num_recent} times within {self._window_s:g} s"
        return ""


class Supervisor:
    """Keeps processes running until told to stop; `failed` resolves when one cannot be kept."""

    def __init__(
        self,
        logs_dir: Path,
        *,
        max_restarts: int,
        restart_window_s: float,
        max_failed_starts: int = 0,
        guardian: Guardian | None = None,
        tell: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """`tell` gets a sentence about each process that is started again or had to be killed."""
        self._tell = tell
        self._logs_dir = logs_dir
        self._guardian = guardian
        self._limits = (max_restarts, restart_window_s, max_failed_starts)
        self._failures: dict[str, _Failures] = {}
        self.expects_progress = False  # set by a command that calls `progressed`
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._num_restarts: dict[str, int] = {}
        self.failed: asyncio.Future[ServiceFailedError] = asyncio.get_running_loop().create_future()
        logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def num_restarts(self) -> dict[str, int]:
        """Restarts so far, by name."""
        return dict(self._num_restarts)

    def progressed(self, *, has_stepped: bool = True) -> None:
        """The run has made progress: ends of processes until now do not keep it from going on.

        Those of a learner do until there is a step (`has_stepped`): episodes say nothing about it.
        """
        for name, failures in self._failures.items():
            if has_stepped or name != "learner":
                failures.num_without_progress = 0

    def log_path(self, name: str) -> Path:
        """Path of the process's output."""
        return self._logs_dir / f"{name}.log"

    async def start(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running; `ConfigError` for a program that cannot be run."""
        try:
            await self._launch(spec)
        except OSError as error:
            if error.filename != spec.argv[0]:  # no process or memory is left
                raise
            raise ConfigError(
                f"{spec.name}: {spec.argv[0]} cannot be run ({error.strerror}): install it again, or "
                "name another one in the section cluster"
            ) from error
        self._keepers[spec.name] = asyncio.create_task(self._keep(spec), name=f"keep {spec.name}")

    def restart(self, name: str) -> None:
        """Ask a process to end; being kept running, it starts anew."""
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(signal.SIGTERM)

    async def stop(self, names: list[str], drain_s: float) -> None:
        """End these processes: SIGTERM, up to `drain_s` of drain, then SIGKILL."""
        for name in names:
            keeper = self._keepers.pop(name, None)
            if keeper is not None:
                keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await keeper
        await asyncio.gather(*(self._end(name, drain_s) for name in names))

    async def _end(self, name: str, drain_s: float) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        if process.returncode is None:
            await self._end_process(name, process, drain_s)
        self._forget(process)

    async def _end_process(
        self, name: str, process: asyncio.subprocess.Process, drain_s: float
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s):
                await process.wait()
        except TimeoutError:
            self._tell(f"{name} has not ended within {drain_s:g} s: killed")
            await self._kill(name, process)

    async def _kill(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Kill a process; leave one behind that waits inside the kernel, for a driver or a disk."""
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILLED_S):
                await process.wait()
        except TimeoutError:
            self._tell(
                f"{name} (process {process.pid}) does not end although it was killed: it waits for a "
                "device or a disk (its GPU, a network file system); it is left behind, and keeps its "
                "memory until that answers"
            )

    async def _launch(self, spec: ProcessSpec) -> asyncio.subprocess.Process:
        if spec.ready_file is not None:
            spec.ready_file.parent.mkdir(parents=True, exist_ok=True)
            spec.ready_file.unlink(missing_ok=True)
        self.log_path(spec.name).touch(mode=0o600)
        with self.log_path(spec.name).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env=spec.env or None,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        self._processes[spec.name] = process
        if self._guardian is not None:
            self._guardian.watch(process.pid)
        return process

    def _forget(self, process: asyncio.subprocess.Process) -> None:
        if self._guardian is not None:
            self._guardian.forget(process.pid)

    async def _keep(self, spec: ProcessSpec) -> None:
        failures = self._failures.setdefault(spec.name, _Failures(*self._limits))
        exit_code = await self._end_of(spec)
        while not self._is_final(spec, failures, exit_code):
            self._tell(
                f"{spec.name} ended ({told_end(exit_code)}) and starts again; its log: "
                f"{self.log_path(spec.name)}"
            )
            await asyncio.sleep(failures.delay_s)
            self._num_restarts[spec.name] = self._num_restarts.get(spec.name, 0) + 1
            exit_code = await self._again(spec)

    async def _end_of(self, spec: ProcessSpec) -> int:
        process = self._processes[spec.name]
        exit_code = await process.wait()
        self._forget(process)
        return exit_code

    async def _again(self, spec: ProcessSpec) -> int:
        """Start a process anew and wait for its end, which comes at once if it cannot be started."""
        try:
            await self._launch(spec)
        except (OSError, RuntimeError) as error:  # no memory or thread is left, or its program is gone
            with contextlib.suppress(OSError), self.log_path(spec.name).open("a") as log:
                log.write(f"it cannot be started: {error}\n")
            return _CANNOT_START
        return await self._end_of(spec)

    def _is_final(self, spec: ProcessSpec, failures: _Failures, exit_code: int) -> bool:
        """Count an end; tells whether it was the last one, which fails the cluster."""
        is_service = spec.ready_file is not None
        too_often = failures.add(
            time.monotonic(),
            was_ready=spec.ready_file is None or spec.ready_file.exists(),
            expects_progress=self.expects_progress and is_service,
        )
        is_final = exit_code == USER_ERROR or bool(too_often)
        if is_final and not self.failed.done():
            log_path = self.log_path(spec.name)
            self.failed.set_result(ServiceFailedError(spec.name, exit_code, log_path, too_often))
        return is_final


def told_end(exit_code: int) -> str:
    """Exit code of a process for people, or the signal that ended it."""
    if exit_code == -signal.SIGKILL:
        return "signal SIGKILL: the kernel sends it where memory is used up: `dmesg` tells"
    names = {int(each): each.name for each in signal.Signals}
    return f"signal {names[-exit_code]}" if -exit_code in names else f"exit code {exit_code}"


def prepare_child() -> None:
    """Runs in the child before exec: SIGTERM when our parent dies, and files for their owner alone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.umask(0o077)
