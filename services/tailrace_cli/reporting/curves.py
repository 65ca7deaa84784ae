"""Curves of runs as data for the page's script: panels of metric keys, and values by step and time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace_cli.summary import Row

Column = list[float | None]
_MAX_POINTS = 2000  # of a series


@dataclass(frozen=True)
class Panel:
    """One picture: its title, and metric keys by label."""

    title: str
    keys: Mapping[str, str]


_SAMPLED, _GREEDY = "eval/success_rate", "eval/greedy/success_rate"
_TRAINING = "success_rate"
PANELS = (
    Panel(
        "Success rate",
        {"held-out, sampled": _SAMPLED, "held-out, greedy": _GREEDY, "training": _TRAINING},
    ),
    Panel("Reward per episode", {"mean": "reward_mean", "standard deviation": "reward_std"}),
    Panel("Loss", {"loss": "loss"}),
    Panel("Entropy of the policy, nats per token", {"entropy": "entropy"}),
    Panel("Staleness of trained tokens, steps", {"mean": "staleness_mean", "maximum": "staleness_max"}),
    Panel(
        "Learner against inference log-probabilities, nats per token",
        {"same weights": "mismatch_kl", "all tokens": "behaviour_kl"},
    ),
    Panel("Trained tokens per second", {"tokens/s": "tokens_per_s"}),
    Panel("Gradient norm", {"policy": "grad_norm", "critic": "critic_grad_norm"}),
    Panel("Divergence from the reference", {"nats per token": "kl", "its weight": "kl_coef"}),
    Panel("Critic", {"loss": "value_loss", "explained variance": "explained_variance"}),
)
COMPARED = (
    Panel("Held-out success, sampled", {"": _SAMPLED}),
    Panel("Held-out success, greedy", {"": _GREEDY}),
    Panel("Success in training", {"": _TRAINING}),
    Panel("Reward per episode", {"": "reward_mean"}),
    Panel("Loss", {"": "loss"}),
    Panel("Entropy of the policy, nats per token", {"": "entropy"}),
    Panel("Staleness of trained tokens, mean, steps", {"": "staleness_mean"}),
    Panel("Log-probabilities, learner against inference, nats", {"": "behaviour_kl"}),
    Panel("Trained tokens per second", {"": "tokens_per_s"}),
    Panel("Gradient norm", {"": "grad_norm"}),
)


def curves(runs: Mapping[str, Sequence[Row]], panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Panels with at least one value; each has a table [step, time, values ...] of every run.

    Series of several runs are named after them.
    """
    ordered = {run: _ordered(rows) for run, rows in runs.items()}
    return [drawn for panel in panels if (drawn := _panel(panel, ordered))["tables"]]


def _panel(panel: Panel, runs: Mapping[str, list[Row]]) -> dict[str, Any]:
    tables, labels = [], []
    for run, rows in runs.items():
        ordered, shown = _thinned(rows, _columns(panel, rows))
        if shown:
            axes = [[_number(row, axis) for row in ordered] for axis in ("step", "time_s")]
            tables.append({"axes": axes, "values": list(shown.values())})
            labels += [run if len(runs) > 1 else label for label in shown]
    return {"title": panel.title, "labels": labels, "tables": tables}


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """The newest row of each step: a resumed run has some steps twice."""
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step, key=lambda step: float(step or 0))]


def _columns(panel: Panel, rows: Sequence[Row]) -> dict[str, Column]:
    """Values of each series that has some."""
    columns = {label: [_number(row, key) for row in rows] for label, key in panel.keys.items()}
    return {
        label: values for label, values in columns.items() if any(value is not None for value in values)
    }


def _thinned(rows: list[Row], columns: Mapping[str, Column]) -> tuple[list[Row], dict[str, Column]]:
    """Rows [n] and columns [n] without what no picture shows: the page of a long run stays small."""
    if len(rows) <= _MAX_POINTS:
        return rows, dict(columns)
    kept = sorted({place for values in columns.values() for place in _extremes(values)})
    return [rows[place] for place in kept], {
        label: [values[place] for place in kept] for label, values in columns.items()
    }


def _extremes(values: Column) -> Iterator[int]:
    """Places of the least and the greatest value of every few neighbours, and of both ends."""
    known = [(value, place) for place, value in enumerate(values) if value is not None]
    width = -(-2 * len(known) // _MAX_POINTS)
    for start in range(0, len(known), max(width, 1)):
        some = known[start : start + width]
        yield from (min(some)[1], max(some)[1])
    yield from (place for _, place in (*known[:1], *known[-1:]))


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, int | float) else None
