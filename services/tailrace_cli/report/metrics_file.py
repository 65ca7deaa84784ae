"""Read `metrics.jsonl`: one object per learner step, step 0 first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, float | int | str | None]


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
