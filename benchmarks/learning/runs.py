"""One run of a recipe: `tailrace train` in a process of its own, and what its metrics say."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.learning.recipes import ROOT, Recipe
from benchmarks.results import Cell, commit_of, machine

_MAX_OTHERS = 0.1
_SAMPLED, _GREEDY = "eval/success_rate", "eval/greedy/success_rate"

Curve = tuple[tuple[int, float], ...]  # (optimizer step, success)


@dataclass(frozen=True)
class Outcome:
    """A finished run: held-out success by step, sampled and greedy, and how long it took."""

    recipe: str
    seed: int
    curve: Curve
    greedy: Curve
    baselines: dict[str, float]  # success of simple players on the same tasks
    total_s: float  # from the start of the cluster to the last evaluation
    training_s: float  # of it, from the first to the last step's evaluation
    measured_at: str
    cpu: Cell
    commit: str = ""  # of the code
    settings: str = ""  # `Recipe.settings`
    others: float = 0.0  # share of the machine's processor time that other work took meanwhile

    @property
    def had_machine(self) -> bool:
        """Hardly any other work ran beside it, so its seconds say something."""
        return self.others < _MAX_OTHERS

    @property
    def end(self) -> float:
        """Sampled success after the last step."""
        return self.curve[-1][1]

    @property
    def best_baseline(self) -> float:
        """Success of the best simple player."""
        return max(self.baselines.values(), default=0.0)

    def cells(self) -> dict[str, Cell]:
        """As a row of the results."""
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "training_s": self.training_s,
            "total_s": self.total_s,
            "curve": _text_of(self.curve),
            "greedy": _text_of(self.greedy),
            "baselines": "; ".join(f"{name}:{value:.4f}" for name, value in self.baselines.items()),
            "measured_at": self.measured_at,
            "cpu": self.cpu,
            "commit": self.commit,
            "settings": self.settings,
            "others": round(self.others, 3),
        }

    @classmethod
    def of_cells(cls, cells: dict[str, Any]) -> Outcome:
        """From a row of the results."""
        baselines = (one.rsplit(":", 1) for one in filter(None, cells["baselines"].split("; ")))
        return cls(
            cells["recipe"],
            cells["seed"],
            _curve_of(cells["curve"]),
            _curve_of(cells["greedy"]),
            {name: float(value) for name, value in baselines},
            cells["total_s"],
            cells["training_s"],
            cells["measured_at"],
            cells["cpu"],
            cells.get("commit", ""),
            cells.get("settings", ""),
            cells.get("others", 0.0),
        )


class NoCheckpointError(FileNotFoundError):
    """A recipe begins with the checkpoint of another one that was not run. Attribute: `recipe`."""

    def __init__(self, recipe: str, seed: int) -> None:
        super().__init__(
            f"no checkpoint of {recipe} with seed {seed}: run it first "
            f"(bench_learning --only {recipe} --seeds {seed} --again)"
        )
        self.recipe = recipe


def last_checkpoint(output_dir: Path, recipe: str, seed: int) -> Path:
    """Newest checkpoint of a recipe's run; raises `NoCheckpointError`."""
    found = (output_dir / f"{recipe}_{seed}" / "checkpoints").glob("step_*")
    numbered = {int(path.name.removeprefix("step_")): path for path in found}
    if not numbered:
        raise NoCheckpointError(recipe, seed)
    return numbered[max(numbered)]


def _text_of(curve: Curve) -> str:
    return " ".join(f"{step}:{success:.4f}" for step, success in curve)


def _curve_of(text: str) -> Curve:
    points = (point.split(":") for point in text.split())
    return tuple((int(step), float(success)) for step, success in points)


def run(recipe: Recipe, seed: int, output_dir: Path) -> Outcome:
    """Train with this seed; raises `CalledProcessError` when the run fails, `NoCheckpointError` if the
    run that it begins with left nothing."""
    name, commit = f"{recipe.name}_{seed}", commit_of(ROOT)
    argv = [sys.executable, "-m", "tailrace_cli", "train", recipe.experiment, "--overwrite"]
    argv += [f"exp_name={name}", f"seed={seed}", f"output_dir={output_dir}", *recipe.overrides]
    if recipe.begins_with:
        argv.append(f"pretrain={last_checkpoint(output_dir, recipe.begins_with, seed)}")
    busy_s, own_s, begun_s = _machine_busy_s(), _children_s(), time.monotonic()
    subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, check=True)
    own_s, took_s = _children_s() - own_s, time.monotonic() - begun_s
    others = max(_machine_busy_s() - busy_s - own_s, 0.0) / (took_s * psutil.cpu_count())
    lines = (output_dir / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    evaluated = [row for row in rows if row.get(_SAMPLED) is not None]
    path = output_dir / name / "baselines.json"  # not there for an environment without simple players
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"": {}}
    return Outcome(
        recipe.name,
        seed,
        tuple((row["step"], row[_SAMPLED]) for row in evaluated),
        tuple((row["step"], row[_GREEDY]) for row in evaluated),
        next(iter(found.values())),
        rows[-1]["time_s"],
        evaluated[-1]["time_s"] - evaluated[0]["time_s"],
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine()["cpu"],
        commit,
        recipe.settings,
        others,
    )


def _machine_busy_s() -> float:
    """Processor seconds that all processes have taken since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _children_s() -> float:
    """Processor seconds of our ended children and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
