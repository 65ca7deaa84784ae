"""Child processes under supervision: logs, restarts with back-off, orderly ends.

Invariants: a child never outlives this process (the kernel signals it when its parent dies); a child
that ends by itself is started again, later each time, unless it says that its configuration is wrong
(exit code 2) or it fails too often, which fails the cluster.
"""

import asyncio
import contextlib
import ctypes
import signal
import time
from collections import deque
from pathlib import Path

from tailrace.log import get_logger
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.servers import tail

USER_ERROR = 2
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
_PR_SET_PDEATHSIG = 1

log = get_logger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class ServiceFailedError(RuntimeError):
    """A service cannot go on: `name`, its `exit_code`, and the end of its log in `log_tail`."""

    def __init__(self, name: str, exit_code: int, log_path: Path) -> None:
        self.name = name
        self.exit_code = exit_code
        self.log_tail = tail(log_path)
        if exit_code == USER_ERROR:
            last = self.log_tail.splitlines()[-1:] or ["(no message)"]
            message = f"{name}: {last[0]}"
        else:
            message = f"{name} keeps failing (exit code {exit_code}); {log_path} ends:\n{self.log_tail}"
        super().__init__(message)


class Supervisor:
    """Keeps processes running until told to stop; `failed` resolves when one cannot be kept."""

    def __init__(self, logs_dir: Path, *, max_restarts: int, restart_window_s: float) -> None:
        self._logs_dir = logs_dir
        self._max_restarts = max_restarts
        self._restart_window_s = restart_window_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._num_restarts: dict[str, int] = {}
        self.failed: asyncio.Future[ServiceFailedError] = asyncio.get_running_loop().create_future()
        logs_dir.mkdir(parents=True, exist_ok=True)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def num_restarts(self) -> dict[str, int]:
        """Restarts so far, by name."""
        return dict(self._num_restarts)

    def log_path(self, name: str) -> Path:
        """Path of the process's output."""
        return self._logs_dir / f"{name}.log"

    async def start(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running."""
        await self._launch(spec)
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
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), drain_s)
        except TimeoutError:
            log.warning("killed_after_drain", service=name, drain_s=drain_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _launch(self, spec: ProcessSpec) -> asyncio.subprocess.Process:
        with self.log_path(spec.name).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env=spec.env or None,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._processes[spec.name] = process
        return process

    async def _keep(self, spec: ProcessSpec) -> None:
        failures: deque[float] = deque()
        while True:
            process = self._processes[spec.name]
            exit_code = await process.wait()
            now = time.monotonic()
            failures.append(now)
            while failures and failures[0] < now - self._restart_window_s:
                failures.popleft()
            log.warning("process_ended", service=spec.name, exit_code=exit_code)
            if exit_code == USER_ERROR or len(failures) > self._max_restarts:
                if not self.failed.done():
                    error = ServiceFailedError(spec.name, exit_code, self.log_path(spec.name))
                    self.failed.set_result(error)
                return
            await asyncio.sleep(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (len(failures) - 1)))
            self._num_restarts[spec.name] = self._num_restarts.get(spec.name, 0) + 1
            await self._launch(spec)


def _die_with_parent() -> None:
    """Runs in the child before exec: ask the kernel for SIGTERM when our parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
