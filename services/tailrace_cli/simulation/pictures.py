"""Pictures of simulated runs: timeline of the engines, histogram of token ages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tailrace_cli.simulation.records import Timeline


def draw(rows: Sequence[dict[str, Any]], timelines: Sequence[Timeline], folder: Path) -> None:
    """Draw ages.png of all rows, and timeline_N.png of each by its number of servers."""
    for row, timeline in zip(rows, timelines, strict=True):
        _draw_timeline(timeline, folder / f"timeline_{row['servers']}.png")
    _draw_ages(rows, folder / "ages.png")


def _draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw requests that decode, and KV in use with idle prefixes, of every engine over time."""
    times = [one[0] for one in timeline]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, values, title in (
        (axes[0], [one[1] for one in timeline], "requests that decode"),
        (axes[1], [one[2] for one in timeline], "share of KV in use, idle prefixes included"),
    ):
        image = axis.pcolormesh(times, range(len(values[0])), np.array(values).T, shading="nearest")
        axis.set_title(title)
        axis.set_ylabel("engine")
        figure.colorbar(image, ax=axis)
    axes[1].set_xlabel("simulated seconds")
    figure.savefig(path)


def _draw_ages(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the share of sampled tokens by age, one line for each row."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        ages = {int(age): share for age, share in row["ages"].items()}
        axis.plot(list(ages), list(ages.values()), marker="o", label=f"{row['servers']} servers")
    axis.set_xlabel("optimizer steps between sampling and training")
    axis.set_ylabel("share of sampled tokens")
    axis.legend()
    figure.savefig(path)
