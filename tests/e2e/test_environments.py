"""`tailrace train` and `tailrace episode` on the examples of Sokoban and WebShop, a few steps long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, TAILRACE, run

DEADLINE_S = 600.0


@pytest.mark.heavy
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("example", ["sokoban", "webshop"])
def test_the_example_trains_draws_its_evaluation_and_plays_in_the_terminal(
    tmp_path: Path, example: str
) -> None:
    experiment = str(ROOT / "examples" / example)
    settings = [*SMALL, f"output_dir={tmp_path}", f"render_save_dir={tmp_path}/pictures"]
    trained = run([TAILRACE, "train", experiment, *settings, "max_steps=2"], DEADLINE_S)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    metrics = tmp_path / example / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["eval/success_rate"] is not None
    assert len(list((tmp_path / "pictures").glob("held_out_*.gif"))) == 8
    played = run([TAILRACE, "episode", experiment, *settings], DEADLINE_S)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "the end" in played.stdout
    assert "sampled at mean log-probability" in played.stdout
