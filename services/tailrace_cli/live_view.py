"""Live view of a run: follows its status messages and shows them in the terminal."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace_cli.cluster.servers import tail
from tailrace_cli.cluster.supervisor import RunEndedError, Supervisor
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus

ENDS = ("finished", "failed")


class ProgressView:
    """Shows `RunStatus` messages; in a terminal as a live panel, elsewhere as a line per change.

    Elsewhere failures are shown at their first, second, fourth, eighth ... occurrence, and every hint
    once.
    """

    def __init__(self, console: Console, title: str, *, is_live: bool = True) -> None:
        self._console = console
        self._title = title
        self._num_failures_shown = 0
        self._hints_shown: tuple[str, ...] = ()
        self._has_failed = False
        self._last_line: tuple[str, int, tuple[float | None, float | None]] | None = None
        self._live = (
            Live(Text(f"{title}: starting"), console=console, refresh_per_second=4)
            if is_live and console.is_terminal
            else None
        )

    def __enter__(self) -> "ProgressView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: RunStatus) -> None:
        """Show a newer status."""
        if self._live is not None:
            self._live.update(self._panel(status))
            return
        self.tell_health(status)
        evaluated = (status.eval_success_rate, status.eval_greedy_success_rate)
        key = (status.phase, status.step - status.step % 10, evaluated)
        if key != self._last_line:
            self._last_line = key
            self._console.print(self._line(status), highlight=False, soft_wrap=True)

    def _panel(self, status: RunStatus) -> RenderableType:
        bar = ProgressBar(total=max(status.max_steps, 1), completed=status.step, width=60)
        table = Table.grid(padding=(0, 3))
        cells = _cells(status)
        for start in range(0, len(cells), 4):
            table.add_row(*(f"[dim]{name}[/dim] {value}" for name, value in cells[start : start + 4]))
        where = f"{status.phase}  step {status.step}/{status.max_steps}"
        heading = Text(f"{self._title}  {where}", style="bold")
        notes = [Text(failure_line(status), style="red")] if status.num_failures else []
        notes += [Text(f"hint: {hint}", style="yellow") for hint in status.hints]
        return Group(heading, bar, table, *notes)

    def tell_health(self, status: RunStatus) -> None:
        """Print failures and hints that are new, as lines."""
        if status.num_failures >= max(1, 2 * self._num_failures_shown):
            self._num_failures_shown = status.num_failures
            self._note(failure_line(status))
        known = {_without_numbers(hint) for hint in self._hints_shown}
        if status.failed is not None and not self._has_failed:
            self._has_failed = True
            self._note(f"the run failed: {status.failed.reason}")
        for hint in status.hints:
            if _without_numbers(hint) not in known:
                self._note(f"hint: {hint}")
        self._hints_shown = status.hints

    def _note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _line(self, status: RunStatus) -> str:
        cells = "  ".join(f"{name} {value}" for name, value in _cells(status))
        return f"{status.phase:<11} step {status.step}/{status.max_steps}  {cells}"


def failure_line(status: RunStatus) -> str:
    """Number of failed episodes, and the newest reason."""
    return f"failed episodes: {status.num_failures}; the newest: {status.newest_failure}"


def _without_numbers(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())


def _cells(status: RunStatus) -> list[tuple[str, str]]:
    greedy = status.eval_greedy_success_rate
    return [
        ("reward", _number(status.reward_mean, "{:.3f}")),
        ("success", _number(status.success_rate, "{:.3f}")),
        (
            "held-out" if greedy is None else "held-out sampled",
            _number(status.eval_success_rate, "{:.3f}"),
        ),
        *([] if greedy is None else [("held-out greedy", f"{greedy:.3f}")]),
        ("version", str(status.policy_version)),
        ("episodes", str(status.num_episodes_running)),
        ("staleness", _number(status.staleness_mean, "{:.2f}")),
        ("tokens/s", _number(status.tokens_per_s, "{:,.0f}")),
        ("ETA", _number(status.eta_s, "{:.0f} s")),
        *([("failed", str(status.num_failures))] if status.num_failures else []),
        *([("waits for", status.blocked_by)] if status.blocked_by else []),
    ]


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


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
        self._heard = asyncio.Event()
        self._ended: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        supervisor.expects_progress = True

    async def on_status(self, status: RunStatus) -> None:
        """Show a status; the last one of a run ends it."""
        self._heard.set()
        self._show(status)
        if status.progress_unix_s > self._progress_unix_s:
            self._progress_unix_s = status.progress_unix_s
            self._supervisor.progressed()
        if status.phase in ENDS and not self._ended.done():
            self._ended.set_result(status)

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
        """Return when no status has come for too long."""
        if not self._silence_s:
            await asyncio.Future()
        while True:
            self._heard.clear()
            try:
                await asyncio.wait_for(self._heard.wait(), self._silence_s)
            except TimeoutError:
                return
