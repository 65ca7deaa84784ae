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
    tailrace("train", experiment, f"output_dir={tmp_path}")
    lines = (tmp_path / "gsm8k_tiny" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward_mean"] for row in map(json.loads, lines) if row.get("reward_mean")]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3])
    shown = tailrace("episode", experiment, f"output_dir={tmp_path}", "--task-seed", "3")
    assert "James decides to run 3 sprints" in shown
    assert "success 0" in shown
