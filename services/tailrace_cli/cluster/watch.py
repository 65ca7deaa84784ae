"""Follows a run of the local cluster to its end by its status messages."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace_cli.cluster.servers import tail
from tailrace_cli.cluster.supervisor import Supervisor
from tailrace_cli.exit_codes import RunEndedError
from tailrace_cli.live_view import ENDS
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus

_SILENT_PARTS = 10  # a stop of the process, however long, counts as one part


class RunFailedError(RunEndedError):
    """The scheduler ended the run, or fell silent: `reason`, and the end of a service's log."""

    def __init__(self, reason: str, logs_dir: Path, service: str) -> None:
        paths = sorted(logs_dir.glob(f"{service}*.log"), key=lambda path: path.stat().st_mtime)
        log = f"\n{paths[-1]} ends:\n{tail(paths[-1])}" if paths else ""
        super().__init__(f"the run failed: {reason}{log}")
        self.reason = reason


class Watch:
    """Follows the status messages of a run to its end.

    `supervisor` is told of the run's progress. A scheduler that is silent for `silence_s` (0: never)
    counts as failed.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        show: Callable[[RunStatus], None],
        logs_dir: Path,
        silence_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._show = show
        self._logs_dir = logs_dir
        self._silence_s = silence_s
        self._progress_unix_s = 0.0
        self._newest_step = -1
        self._heard = asyncio.Event()
        self._ended: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        supervisor.expects_progress = True

    async def on_status(self, status: RunStatus) -> None:
        """Show a status; the last one of a run ends it."""
        self._heard.set()
        if status.progress_unix_s > self._progress_unix_s:
            self._progress_unix_s = status.progress_unix_s
            self._supervisor.progressed(has_stepped=status.step > self._newest_step)
            self._newest_step = max(status.step, self._newest_step)
        if status.phase in ENDS and not self._ended.done():
            self._ended.set_result(status)
        self._show(status)

    async def follow(
        self, endpoints: Endpoints, run: str, interrupted: asyncio.Event
    ) -> RunStatus | None:
        """Return the last status of a run that has finished, None when interrupted.

        Raises `RunEndedError` when the run has failed, or the cluster cannot go on.
        """
        bus = await Bus.connect(endpoints, name="cli")
        silence = asyncio.create_task(self._silent())
        interruption = asyncio.create_task(interrupted.wait())
        failed = self._supervisor.failed
        try:
            await bus.subscribe(subjects.run_status(run), RunStatus, self.on_status)
            ends: set[asyncio.Future[Any]] = {self._ended, failed, interruption, silence}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interruption.cancel()
            silence.cancel()
            await bus.close()
        if failed.done():
            raise failed.result()
        if not self._ended.done() and silence.done() and not silence.cancelled():
            reason = f"the scheduler has said nothing for {self._silence_s:.0f} s"
            raise RunFailedError(reason, self._logs_dir, "scheduler")
        status = self._ended.result() if self._ended.done() else None
        if status is not None and status.failed is not None:
            raise RunFailedError(status.failed.reason, self._logs_dir, status.failed.service)
        return status

    async def _silent(self) -> None:
        """Return when no status has come for too long.

        Time in which this process was stopped (Ctrl-Z) does not count: nobody listened.
        """
        if not self._silence_s:
            await asyncio.Future()
        part_s = self._silence_s / _SILENT_PARTS
        num_silent = 0
        while num_silent < _SILENT_PARTS:
            self._heard.clear()
            try:
                async with asyncio.timeout(part_s):
                    await self._heard.wait()
                num_silent = 0
            except TimeoutError:
                num_silent += 1
