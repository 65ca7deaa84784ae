"""Live view of a run in the terminal, from its status messages."""

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from tailrace_protos.control import RunStatus

ENDS = ("finished", "failed")
WARM_START = "warm_start"
_BAR_WIDTH = 76


class ProgressView:
    """Shows `RunStatus` messages; in a terminal as a live panel, elsewhere as a line per change.

    A terminal that cannot move its cursor (`TERM=dumb`) gets lines, too. There failures are shown at
    their first, second, fourth, eighth ... occurrence, and every hint once.
    """

    def __init__(self, console: Console, title: str, *, is_live: bool = True) -> None:
        self._console = console
        self._title = title
        self._num_failures_shown = 0
        self._hints_shown: tuple[str, ...] = ()
        self._has_failed = self._has_ended_early = False
        self._last_line: tuple[object, ...] = ()
        self._width = console.width
        self._live = (
            Live(Text(f"{title}: starting"), console=console, auto_refresh=False)
            if is_live and console.is_terminal and not console.is_dumb_terminal
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
            if self._console.width < self._width:  # the terminal has broken the lines of the panel
                self._console.control(Control.clear(), Control.home())
            self._width = self._console.width
            self._live.update(self._panel(status), refresh=True)
            return
        self.tell_health(status)
        evaluated = (status.eval_success_rate, status.eval_greedy_success_rate)
        done, total = _progress(status)
        tenth = 10 * done // total if status.phase == WARM_START else done // 10
        key = (status.phase, tenth, evaluated)
        if key != self._last_line:
            self._last_line = key
            self._console.print(self._line(status), soft_wrap=True)

    def _panel(self, status: RunStatus) -> RenderableType:
        done, total = _progress(status)
        heading = Text(
            f"{self._title}  {_where(status)}", style="bold", overflow="ellipsis", no_wrap=True
        )
        bar = ProgressBar(
            total, done, min(_BAR_WIDTH, self._width - 2), style="dim", complete_style="green"
        )
        cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in _cells(status)]
        notes = [Text(failure_line(status), style="red")] if status.num_failures else []
        notes += [Text(f"training ends early: {status.ended_early}")] if status.ended_early else []
        notes += [Text(f"hint: {hint}", style="yellow") for hint in status.hints]
        return Group(heading, Padding(bar, expand=False), Columns(cells, padding=(0, 3)), *notes)

    def tell_health(self, status: RunStatus) -> None:
        """Print failures and hints that are new, as lines."""
        if status.num_failures >= max(1, 2 * self._num_failures_shown):
            self._num_failures_shown = status.num_failures
            self._note(failure_line(status))
        known = {_without_numbers(hint) for hint in self._hints_shown}
        if status.failed is not None and not self._has_failed:
            self._has_failed = True
            self._note(f"the run failed: {status.failed.reason}")
        if status.ended_early and not self._has_ended_early:
            self._has_ended_early = True
            self._note(f"training ends early: {status.ended_early}")
        for hint in status.hints:
            if _without_numbers(hint) not in known:
                self._note(f"hint: {hint}")
        self._hints_shown = status.hints

    def _note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _line(self, status: RunStatus) -> str:
        cells = "  ".join(f"{name} {value}" for name, value in _cells(status))
        return f"{_where(status):<26} {cells}"


def failure_line(status: RunStatus) -> str:
    """Number of failed episodes, and the newest reason."""
    return f"failed episodes: {status.num_failures}; the newest: {status.newest_failure}"


def _without_numbers(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())


def _where(status: RunStatus) -> str:
    done, total = _progress(status)
    phase = status.phase.replace("_", " ")
    if status.phase == WARM_START and not status.warm_start_num_steps:
        return phase  # the learner has not told its number of steps yet
    return f"{phase}  step {done}/{total}"


def _progress(status: RunStatus) -> tuple[int, int]:
    """Steps of the warm start while it is under way, otherwise those of the run: done, at least 1."""
    if status.phase == WARM_START and status.warm_start_num_steps:
        return status.warm_start_step, status.warm_start_num_steps
    return status.step, max(status.max_steps, 1)


def _cells(status: RunStatus) -> list[tuple[str, str]]:
    """Names and values, those first that matter most."""
    greedy = status.eval_greedy_success_rate
    return [
        ("success", _number(status.success_rate, "{:.3f}")),
        (
            "held-out" if greedy is None else "held-out sampled",
            _number(status.eval_success_rate, "{:.3f}"),
        ),
        *([] if greedy is None else [("held-out greedy", f"{greedy:.3f}")]),
        ("failed", f"{status.num_failures:,}"),
        ("version", "-" if status.policy_version < 0 else str(status.policy_version)),
        ("reward", _number(status.reward_mean, "{:.3f}")),
        ("staleness", _number(status.staleness_mean, "{:.2f}")),
        ("tokens/s", _number(status.tokens_per_s, "{:,.0f}")),
        ("episodes", f"{status.num_episodes_running:,}"),
        ("ETA", _number(status.eta_s, "{:.0f} s")),
        *([("waits for", status.blocked_by)] if status.blocked_by and status.phase not in ENDS else []),
    ]


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
