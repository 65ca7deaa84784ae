"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tailrace_cli.report.metrics_file import Row, idle_seconds, last, series


def summary_rows(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Name and value of everything worth a line, from the run's metrics."""
    steps, success = series(rows, "eval/success_rate")
    _, staleness = series(rows, "staleness_max")
    found: list[tuple[str, str]] = [("optimizer steps", str(rows[-1]["step"]) if rows else "0")]
    if success:
        found.append((f"held-out success, step {steps[0]}", f"{success[0]:.3f}"))
        found.append((f"held-out success, step {steps[-1]}", f"{success[-1]:.3f}"))
    for name, key, pattern in (
        ("reward of the last step", "reward_mean", "{:.3f}"),
        ("wall time", "time_s", "{:.1f} s"),
        ("trained tokens per second", "tokens_per_s", "{:,.0f}"),
    ):
        value = last(rows, key)
        if value is not None:
            found.append((name, pattern.format(value)))
    if staleness:
        found.append(("staleness of trained tokens, at most", f"{max(staleness):.0f} steps"))
    outcomes = sorted({key for row in rows for key in row if key.startswith("outcome/")})
    for key in outcomes:
        total = sum(series(rows, key)[1])
        if total:
            found.append((f"episodes {key.removeprefix('outcome/')}", f"{total:,.0f}"))
    idle = {key: seconds for key, seconds in idle_seconds(rows).items() if seconds >= 0.05}
    for key, seconds in idle.items():
        found.append((f"waiting for {key.removeprefix('idle/')}", f"{seconds:.1f} s"))
    return found


def summary_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title=title, show_header=False)
    for name, value in summary_rows(rows):
        table.add_row(name, value)
    return table
