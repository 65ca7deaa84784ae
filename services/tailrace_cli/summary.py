"""Summary of a run: its `metrics.jsonl`, read as rows, and the table at its end."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

Row = dict[str, float | int | str | None]
Baselines = Mapping[str, Mapping[str, float]]  # success by tag and player
GREEDY = "greedy"


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of a run's `metrics.jsonl`; a torn last line (the writer was killed) is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps [n] and values [n] of the rows where `key` is a number."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    steps = [int(step) for step, _ in points if isinstance(step, int | float)]
    values = [float(value) for _, value in points if isinstance(value, int | float)]
    return steps, values


def last(rows: Sequence[Row], key: str) -> float | None:
    """The newest number under `key`."""
    _, values = series(rows, key)
    return values[-1] if values else None


def idle_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds per `idle/<cause>`, summed over the run."""
    keys = sorted({key for row in rows for key in row if key.startswith("idle/")})
    return {key: sum(series(rows, key)[1]) for key in keys}


Line = tuple[str, str]

_LAST_VALUES = (
    ("reward of the last step", "reward_mean", "{:.3f}"),
    ("wall time", "time_s", "{:.1f} s"),
)
_SHORTEST_WAIT_S = 0.05


def summary_rows(rows: Sequence[Row], baselines: Baselines, temperature: float) -> list[Line]:
    """Name and value of everything worth a line, from the run's metrics.

    `temperature` is that of the evaluation; `baselines` are those of `measure_baselines`.
    """
    num_steps = str(rows[-1]["step"]) if rows else "0"
    return [
        ("optimizer steps", num_steps),
        *_success(rows, "eval/success_rate", sampling_name(temperature)),
        *_success(rows, "eval/greedy/success_rate", GREEDY),
        *_baselines(baselines),
        *_last_values(rows),
        *_rate(rows),
        *_staleness(rows),
        *_outcomes(rows),
        *_waits(rows),
    ]


def sampling_name(temperature: float) -> str:
    """Name of the replies of an evaluation."""
    return f"sampled at temperature {temperature:g}" if temperature else GREEDY


def _success(rows: Sequence[Row], key: str, how: str) -> Iterator[Line]:
    steps, success = series(rows, key)
    for at in sorted({0, len(steps) - 1}) if steps else ():
        yield f"held-out success, {how}, step {steps[at]}", f"{success[at]:.3f}"


def _baselines(baselines: Baselines) -> Iterator[Line]:
    for tag, found in baselines.items():
        of_tag = f" ({tag})" if len(baselines) > 1 else ""
        for name, success in found.items():
            yield f"held-out success of a simple player: {name}{of_tag}", f"{success:.3f}"


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


def summary_table(title: str, lines: Sequence[Line]) -> Table:
    """The lines of `summary_rows` as a table for the terminal."""
    table = Table(title=title, show_header=False)
    for name, value in lines:
        table.add_row(name, value)
    return table
