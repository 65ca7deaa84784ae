"""Live view of a run: follows its status messages and shows them in the terminal."""

import asyncio
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace_cli.cluster.supervisor import ServiceFailedError
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus


class ProgressView:
    """Shows `RunStatus` messages; in a terminal as a live panel, elsewhere as a line per change."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._last_line: tuple[str, int, tuple[float | None, float | None]] | None = None
        self._live = (
            Live(Text(f"{title}: starting"), console=console, refresh_per_second=4)
            if console.is_terminal
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
        return Group(heading, bar, table)

    def _line(self, status: RunStatus) -> str:
        cells = "  ".join(f"{name} {value}" for name, value in _cells(status))
        return f"{status.phase:<11} step {status.step}/{status.max_steps}  {cells}"


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
        *([("waits for", status.blocked_by)] if status.blocked_by else []),
    ]


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


FINISHED = "finished"


async def watch(
    endpoints: Endpoints,
    run: str,
    show: Callable[[RunStatus], None],
    failed: asyncio.Future[ServiceFailedError],
    interrupted: asyncio.Event,
) -> RunStatus | None:
    """Show every status until the run is finished (its last status) or interrupted (None).

    Raises `ServiceFailedError` when the cluster cannot go on.
    """
    finished: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()

    async def on_status(status: RunStatus) -> None:
        show(status)
        if status.phase == FINISHED and not finished.done():
            finished.set_result(status)

    bus = await Bus.connect(endpoints, name="cli")
    interruption = asyncio.create_task(interrupted.wait())
    try:
        await bus.subscribe(subjects.run_status(run), RunStatus, on_status)
        ends: set[asyncio.Future[Any]] = {finished, failed, interruption}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interruption.cancel()
        await bus.close()
    if failed.done():
        raise failed.result()
    return finished.result() if finished.done() else None
