"""`tailrace train examples/calculator`: a tiny model learns to use a tool that a worker serves.

The example starts with the format alone and takes 200 steps; here some demonstrations are right, and 60
steps suffice. How far it gets depends on the luck of one seed: it must clearly exceed its start.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, TAILRACE, environment

DEADLINE_S = 900.0
SHORT = (
    "max_steps=60",
    "scheduler.eval_groups=256",
    "learner.zero_variance_groups=count",
    "learner.warm_start.num_steps=300",
    "+learner.warm_start.options.skill=0.35",
)


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_model_learns_to_call_the_calculator_instead_of_guessing(tmp_path: Path) -> None:
    argv = [TAILRACE, "train", str(ROOT / "examples" / "calculator"), f"output_dir={tmp_path}", *SHORT]
    process = subprocess.run(
        argv,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "calculator/metrics.jsonl").read_text().splitlines()
    ]
    first, last = rows[0]["eval/success_rate"], rows[-1]["eval/success_rate"]
    assert first <= 0.6
    assert last >= first + 0.25
    (players,) = json.loads((tmp_path / "calculator/baselines.json").read_text()).values()
    assert rows[-1]["eval/greedy/success_rate"] > max(players.values())
