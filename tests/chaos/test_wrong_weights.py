"""One of two inference servers takes wrong weights: it is caught, leaves, comes back, the run ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailrace_learner.adapters.trajectory_files import read_groups
from tailrace_protos.control import source_of
from tailrace_protos.trajectory import TokenRow, TrajectoryGroup
from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import command, environment
from tests.provenance import sources_of, versions_of

DEADLINE_S = 400.0
MAX_STEPS = 100  # many times as long as a server needs to start again
WRONG = "inference-1"
MAX_STALENESS = 2  # the experiment's own, as are all settings of the sentinel
MAX_WRONG_STEPS = 12  # from the first one that could have wrong tokens to the one that finds them


def train(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of two servers, of which one goes wrong at its third version."""
    argv = command(
        "train",
        f"max_steps={MAX_STEPS}",
        "groups_per_step=8",
        "cluster.num_inference_servers=2",
        *overrides,
        output_dir=tmp_path,
        exp_name="wrong",
    )
    shutil.copytree(Path(__file__).parent / "corruption", tmp_path / "corruption")
    before = os.environ.get("PYTHONPATH")
    path = [str(tmp_path / "corruption"), *([before] if before else [])]
    env = environment() | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_tokens(
    groups: list[TrajectoryGroup], step: int, steps: dict[int, int], caught: dict[str, Any]
) -> tuple[int, int]:
    """Tokens that a learner with `step` steps may train, and of them those of the wrong server."""
    fresh = wrong = 0
    for group in groups:
        members = [member for member in group.members if member.outcome.is_valid]
        if len({member.reward for member in members}) < 2:
            continue  # teaches nothing
        for row in (row for member in members for row in member.rows):
            ages = step - np.vectorize(steps.get)(np.array(versions_of(row.spans)))
            is_fresh = ages <= MAX_STALENESS
            is_wrong = sampled_by(row, caught) & (step - ages > caught["good_step"])
            fresh += int(is_fresh.sum())
            wrong += int((is_fresh & is_wrong).sum())
    return fresh, wrong


def sampled_by(row: TokenRow, caught: dict[str, Any]) -> NDArray[np.bool_]:
    """Marks the sampled tokens of the row that this start of this server sampled."""
    source = source_of(caught["server_id"], caught["incarnation"])
    return np.array([name == source for name in sources_of(row.spans)])


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_server_with_wrong_weights_is_caught_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir, done = tmp_path / "wrong", train(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong_version = int((tmp_path / "corruption" / "first_wrong_version").read_text())

    events = [row["body"] for row in rows_of(run_dir / "events.jsonl")]
    (caught,) = [body for body in events if body["type"] == "server_quarantined"]
    assert caught["server_id"] == WRONG
    assert caught["mismatch"] > caught["max_mismatch"]
    assert caught["good_step"] < caught["step"]

    applied = [
        (at, body["policy_version"])
        for at, body in enumerate(events)
        if body["type"] == "server_weights_applied" and body["server_id"] == WRONG
    ]
    assert wrong_version in [version for _, version in applied]
    assert [version for at, version in applied if at > events.index(caught) and version > wrong_version]

    finished = {body["step"]: body for body in events if body["type"] == "step_finished"}
    steps = {body["policy_version"]: step for step, body in finished.items()}
    steps[min(steps) - 1] = 0
    assert caught["good_step"] < steps[wrong_version] <= caught["step"]
    assert caught["step"] <= steps[wrong_version] + MAX_WRONG_STEPS

    rows = rows_of(run_dir / "metrics.jsonl")
    errors = {server: [row.get(f"drift/{server}") for row in rows] for server in ("inference-0", WRONG)}
    known = {server: [error for error in errors[server] if error is not None] for server in errors}
    assert max(known["inference-0"]) < 1e-3
    assert max(known[WRONG]) > caught["max_mismatch"]
    assert sum(row.get("num_quarantined_tokens") or 0 for row in rows) > 0
    expected = {}
    for path in (run_dir / "trajectories").glob("*.msgpack"):
        step = int(path.name.split("_")[1].split("-")[0])
        if step > caught["step"]:
            expected[step] = num_tokens(read_groups(path), step - 1, steps, caught)
    assert any(num_wrong for _, num_wrong in expected.values())
    for step, (num_fresh, num_wrong) in expected.items():
        told = finished[step]["metrics"]
        assert told["num_quarantined_tokens"] == num_wrong, step
        assert told["num_trained_tokens"] == num_fresh - num_wrong, step
    assert known[WRONG][-1] < 1e-3, "the server that was started anew has good weights"
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
