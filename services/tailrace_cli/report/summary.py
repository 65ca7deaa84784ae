"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from tailrace_cli.report.metrics_file import Row, idle_seconds, last, series

Line = tuple[str, str]

_LAST_VALUES = (
    ("reward of the last step", "reward_mean", "{:.3f}"),
    ("wall time", "time_s", "{:.1f} s"),
)
_SHORTEST_WAIT_S = 0.05


def summary_rows(rows: Sequence[Row]) -> list[Line]:
    """Name and value of everything worth a line, from the run's metrics."""
    num_steps = str(rows[-1]["step"]) if rows else "0"
    return [
        ("optimizer steps", num_steps),
        *_success(rows),
        *_last_values(rows),
        *_rate(rows),
        *_staleness(rows),
        *_outcomes(rows),
        *_waits(rows),
    ]


def _success(rows: Sequence[Row]) -> Iterator[Line]:
    steps, success = series(rows, "eval/success_rate")
    if success:
        yield f"held-out success, step {steps[0]}", f"{success[0]:.3f}"
        yield f"held-out success, step {steps[-1]}", f"{success[-1]:.3f}"


def _last_values(rows: Sequence[Row]) -> Iterator[Line]:
    for name, key, pattern in _LAST_VALUES:
        value = last(rows, key)
        if value is not None:
            yield name, pattern.format(value)


def _rate(rows: Sequence[Row]) -> Iterator[Line]:
    """Over all steps: single ones, late in a run, may have nothing left to train on."""
    times = series(rows, "time_s")[1]
    num_tokens = sum(series(rows, "num_trained_tokens")[1])
    if num_tokens and times[-1] > times[0]:
        yield "trained tokens per second", f"{num_tokens / (times[-1] - times[0]):,.0f}"


def _staleness(rows: Sequence[Row]) -> Iterator[Line]:
    _, staleness = series(rows, "staleness_max")
    if staleness:
        yield "staleness of trained tokens, at most", f"{max(staleness):.0f} steps"


def _outcomes(rows: Sequence[Row]) -> Iterator[Line]:
    for key in sorted({key for row in rows for key in row if key.startswith("outcome/")}):
        total = sum(series(rows, key)[1])
        if total:
            yield f"episodes {key.removeprefix('outcome/')}", f"{total:,.0f}"


def _waits(rows: Sequence[Row]) -> Iterator[Line]:
    for key, seconds in idle_seconds(rows).items():
        if seconds >= _SHORTEST_WAIT_S:
            yield f"waiting for {key.removeprefix('idle/')}", f"{seconds:.1f} s"


def summary_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title=title, show_header=False)
    for name, value in summary_rows(rows):
        table.add_row(name, value)
    return table
