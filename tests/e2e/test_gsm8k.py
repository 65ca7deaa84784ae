"""`tailrace train examples/gsm8k/tiny.yaml` over the real questions, then one in the terminal."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, TAILRACE, environment

FOLDER = Path(os.environ.get("TAILRACE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
DEADLINE_S = 600.0
MAX_STEPS = 20  # in ten, what is learned is hardly more than the noise of 32 replies a step


def tailrace(*arguments: str) -> str:
    process = subprocess.run(
        [TAILRACE, *arguments],
        env={**environment(), "TAILRACE_GSM8K": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.heavy
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_tiny_model_answers_gsm8k_and_learns_to_answer_in_digits(tmp_path: Path) -> None:
    if not (FOLDER / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K files in {FOLDER}: name their folder in TAILRACE_GSM8K")
    experiment = str(ROOT / "examples" / "gsm8k" / "tiny.yaml")
    tailrace("train", experiment, f"output_dir={tmp_path}", f"max_steps={MAX_STEPS}")
    lines = (tmp_path / "gsm8k_tiny" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"]]
    assert len(rows) == MAX_STEPS
    # Without questions that a digit answers by luck, the reward is minus the share of other letters.
    digits = [1.0 + row["reward_mean"] - row["success_rate"] for row in rows]
    assert sum(digits[-5:]) > sum(digits[:5])
    shown = tailrace("episode", experiment, f"output_dir={tmp_path}", "--task-seed", "3")
    assert "James decides to run 3 sprints" in shown
    assert "success 0" in shown
