"""One of two inference servers takes wrong weights: it is caught, leaves, comes back, the run ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import command, environment

DEADLINE_S = 400.0
MAX_STEPS = 150  # many times as long as a server needs to start again
WRONG = "inference-1"


def train(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of two servers, of which one goes wrong at its third version."""
    argv = command(
        "train",
        f"max_steps={MAX_STEPS}",
        "max_staleness=0",
        "cluster.num_inference_servers=2",
        "learner.min_mismatch_tokens=32",
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

    rows = rows_of(run_dir / "metrics.jsonl")
    errors = {server: [row.get(f"drift/{server}") for row in rows] for server in ("inference-0", WRONG)}
    known = {server: [error for error in errors[server] if error is not None] for server in errors}
    assert max(known["inference-0"]) < 1e-3
    assert max(known[WRONG]) > caught["max_mismatch"]
    assert sum(row.get("num_quarantined_tokens") or 0 for row in rows) > 0
    (finding,) = [row for row in rows if row.get("step") == caught["step"] + 1]
    assert finding["num_quarantined_tokens"] > 0, "the step that found it trains its tokens no more"
    assert known[WRONG][-1] < 1e-3, "the server that was started anew has good weights"
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
