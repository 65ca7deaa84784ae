"""A real run whose learner and servers take turns on the machine.

`TAILRACE_ENGINE` names the engine of the servers, see `make test-engines`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import command, run

ENGINE = os.environ.get("TAILRACE_ENGINE", "torch")
NUM_STEPS = 4
NUM_SERVERS = min(2, torch.cuda.device_count() or 2)  # each has a GPU where there are some
ON_ANY_DEVICE = (
    "learner.device=auto",
    "learner.model_args.dtype=float32",
    "inference.device=auto",
    "inference.dtype=float32",
    "inference.kv_cache_tokens=32768",
)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_servers_sleep_in_each_step_and_nothing_is_lost(tmp_path: Path) -> None:
    argv = command(
        "train",
        "colocated=true",
        f"max_steps={NUM_STEPS}",
        "eval_steps=2",
        "save_steps=2",
        f"inference.engine={ENGINE}",
        f"cluster.num_inference_servers={NUM_SERVERS}",
        *ON_ANY_DEVICE,
        output_dir=tmp_path,
        exp_name="turns",
    )
    result = run(argv, timeout_s=550.0)
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = tmp_path / "turns"
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == NUM_STEPS
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    known = [row["mismatch_kl"] for row in rows if row["mismatch_kl"] is not None]
    assert max(known) < 1e-6, "weights or keys changed in a sleep"
    logs = sorted((run_dir / "logs").glob("inference*.log"))
    assert len(logs) == NUM_SERVERS
    for log in (each.read_text() for each in logs):
        assert log.count("woke up") >= NUM_STEPS, log[-2000:]
