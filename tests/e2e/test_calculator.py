"""`tailrace train examples/calculator`: a tiny model learns to use a tool that a worker serves.

How far it gets depends on the luck of one seed; here it must clearly do better than its warm start.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, TAILRACE, environment

DEADLINE_S = 900.0


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_model_learns_to_call_the_calculator_instead_of_guessing(tmp_path: Path) -> None:
    argv = [TAILRACE, "train", str(ROOT / "examples" / "calculator"), f"output_dir={tmp_path}"]
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
    first, last = rows[0]["eval/greedy/success_rate"], rows[-1]["eval/greedy/success_rate"]
    (players,) = json.loads((tmp_path / "calculator/baselines.json").read_text()).values()
    assert first <= 0.2
    assert last >= first + 0.3
    assert last > max(players.values())
