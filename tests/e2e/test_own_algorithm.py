"""`tailrace train examples/own_algorithm`: an estimator and a loss in a user's file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tailrace_learner.adapters.trajectory_files import read_groups
from tailrace_protos.base import as_uint8
from tests.e2e.runs import ROOT, TAILRACE, run

EXPERIMENT = ROOT / "examples" / "own_algorithm"
STEPS = 3

pytestmark = pytest.mark.timeout(900)  # a whole run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's directory."""
    output_dir = tmp_path_factory.mktemp("runs")
    settings = [f"max_steps={STEPS}", "learner.warm_start.num_steps=200", f"output_dir={output_dir}"]
    settings += ["eval_steps=0", "scheduler.eval_groups=16", "scheduler.eval_interim_groups=8"]
    result = run([TAILRACE, "train", str(EXPERIMENT), *settings], timeout_s=500.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return output_dir / "own_algorithm"


def test_the_users_loss_and_estimator_train(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    rows = [row for row in rows if row["num_groups_train"]]
    assert rows, "in no step was there a group whose rewards differ"
    for row in rows:
        assert 0.0 <= row["far_fraction"] <= 1.0  # only the user's loss counts it
        assert 0.0 <= row["reward_mean"] <= 1.0
        assert np.isfinite(row["loss"])
        assert row["grad_norm"] > 0.0
    paths = sorted((trained / "trajectories").iterdir())
    losses = [_median_loss(paths[row["step"] - 1]) for row in rows]
    # On the policy the ratio is 1 up to rounding: the loss is the mean of the negative advantages.
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=0.0, atol=1e-5)
    assert any(abs(loss) > 1e-4 for loss in losses), "as if all advantages were 0"


def _median_loss(path: Path) -> float:
    """Mean over a step's trained tokens of median - R, by plain arithmetic; equal groups count."""
    total, num_tokens = 0.0, 0
    for group in read_groups(path):
        members = [member for member in group.members if member.outcome.is_valid]
        returns = np.array([member.reward for member in members])
        if len(members) < 2:
            continue
        for member, reward in zip(members, returns, strict=True):
            count = sum(int(as_uint8(row.loss_mask).sum()) for row in member.rows)
            total += float(np.median(returns) - reward) * count
            num_tokens += count
    return total / num_tokens if num_tokens else 0.0
