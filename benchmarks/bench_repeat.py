"""A seeded, synchronous run of 20 steps, step by step beside the same run on an earlier commit.

    make bench-repeat

With `max_staleness: 0` and `agents.seeded_rollouts` the demo's run repeats its rewards, losses and
gradient norms up to rounding. So a change that should change no number is compared with an earlier
commit, whose figures `results/repeat_reference.json` holds. Another processor rounds matrix products
differently: after some steps it may sample another token, and all later figures differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS_DIR, Cell, Results

NUM_STEPS = 20
KEYS = ("reward_mean", "loss", "grad_norm")
SETTINGS = {
    "seed": 1,
    "max_staleness": 0,
    "max_steps": NUM_STEPS,
    "save_steps": 1000,
    "eval_steps": 1000,
    "scheduler.eval_groups": 16,
    "scheduler.eval_interim_groups": 16,
    "agents.seeded_rollouts": True,
}
REFERENCE = RESULTS_DIR / "repeat_reference.json"


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """Reward, loss and gradient norm of each optimizer step of a run."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return [{key: step[key] for key in KEYS} for step in steps if step["step"] > 0]


def run(folder: Path) -> list[dict[str, float]]:
    """Train the demo with `SETTINGS`; returns its steps."""
    given = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "tailrace_cli", "train", "examples/frozen_lake"]
    subprocess.run([*command, "exp_name=repeat", f"output_dir={folder}", *given], check=True)
    return steps_of(folder / "repeat")


def relative(now: float, before: float) -> float:
    """Distance of two figures as a share of the larger."""
    return abs(now - before) / max(abs(now), abs(before), 1e-12)


def main() -> int:
    """Run, compare, write `results/repeat.json`."""
    reference: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    results = Results("repeat", ["torch", "transformers", "numpy"], reference=reference["commit"])
    with tempfile.TemporaryDirectory() as folder:
        steps = run(Path(folder))
    worst = dict.fromkeys(KEYS, 0.0)
    for index, (now, before) in enumerate(zip(steps, reference["steps"], strict=True), start=1):
        for key in KEYS:
            worst[key] = max(worst[key], relative(now[key], before[key]))
        earlier: dict[str, Cell] = {f"{key}_before": before[key] for key in KEYS}
        results.add(step=index, **now, **earlier)
    results.at_most("rewards: largest relative difference in 20 steps", worst["reward_mean"], 0.0)
    results.at_most("losses: largest relative difference in 20 steps", worst["loss"], 1e-4)
    results.at_most("gradient norms: largest relative difference in 20 steps", worst["grad_norm"], 1e-4)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
