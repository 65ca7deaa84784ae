"""One run of a recipe: `tailrace train` in a process of its own, and what its metrics say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import Recipe
from benchmarks.results import Cell, commit_of, machine

ROOT = Path(__file__).parents[2]
_KEY = "eval/success_rate"


@dataclass(frozen=True)
class Outcome:
    """A finished run: held-out success by step, and how long it took."""

    recipe: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    total_s: float  # from the start of the cluster to the last evaluation
    training_s: float  # of it, from the first to the last step's evaluation
    measured_at: str
    cpu: Cell
    commit: str = ""  # of the code; empty: rows did not say it then

    @property
    def start(self) -> float:
        """Success before reinforcement learning."""
        return self.curve[0][1]

    @property
    def end(self) -> float:
        """Success after the last step."""
        return self.curve[-1][1]

    def cells(self) -> dict[str, Cell]:
        """As a row of the results."""
        points = " ".join(f"{step}:{success:.4f}" for step, success in self.curve)
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "start": self.start,
            "end": self.end,
            "training_s": self.training_s,
            "total_s": self.total_s,
            "curve": points,
            "measured_at": self.measured_at,
            "cpu": self.cpu,
            "commit": self.commit,
        }

    @classmethod
    def of_cells(cls, cells: dict[str, Any]) -> Outcome:
        """From a row of the results."""
        points = (point.split(":") for point in cells["curve"].split())
        return cls(
            cells["recipe"],
            cells["seed"],
            tuple((int(step), float(success)) for step, success in points),
            cells["total_s"],
            cells["training_s"],
            cells["measured_at"],
            cells["cpu"],
            cells.get("commit", ""),
        )


def run(recipe: Recipe, seed: int, output_dir: Path) -> Outcome:
    """Train with this seed; raises `CalledProcessError` when the run fails."""
    name, commit = f"{recipe.name}_{seed}", commit_of(ROOT)
    argv = [sys.executable, "-m", "tailrace_cli", "train", recipe.experiment, "--overwrite"]
    argv += [f"exp_name={name}", f"seed={seed}", f"output_dir={output_dir}", *recipe.overrides]
    subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, check=True)
    lines = (output_dir / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    evaluated = [row for row in rows if row.get(_KEY) is not None]
    return Outcome(
        recipe.name,
        seed,
        tuple((row["step"], row[_KEY]) for row in evaluated),
        rows[-1]["time_s"],
        evaluated[-1]["time_s"] - evaluated[0]["time_s"],
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine()["cpu"],
        commit,
    )
