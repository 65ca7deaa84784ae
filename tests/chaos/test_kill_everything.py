"""SIGKILL for every service and both servers in one run: it ends by itself, the audit balances."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.live_run import VICTIMS, find
from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import command, environment

DEADLINE_S = 900.0
MAX_STEPS = 200
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)


def wait_for_victim(
    process: subprocess.Popen[str], victim: str, deadline: float
) -> psutil.Process | None:
    """The victim once it runs; None when the run has ended first."""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return None
        found = find(psutil.Process(process.pid), VICTIMS[victim])
        if found is not None:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{victim} never ran")


def killed_at_random(
    process: subprocess.Popen[str], victim: str, chance: random.Random, deadline: float
) -> bool:
    """SIGKILL for the victim at a random moment; false when the run has ended first."""
    while (found := wait_for_victim(process, victim, deadline)) is not None:
        time.sleep(chance.uniform(0.0, 0.5))
        try:
            found.kill()
        except psutil.NoSuchProcess:  # it has ended by itself meanwhile, and starts again
            continue
        return True
    return False


def wait_for_steps(
    process: subprocess.Popen[Any], run_dir: Path, num_steps: int, deadline: float
) -> None:
    """Return once the run has that many optimizer steps behind it, or has ended."""
    while time.monotonic() < deadline and process.poll() is None:
        if num_finished(run_dir) >= num_steps:
            return
        time.sleep(0.02)


def num_finished(run_dir: Path) -> int:
    events = run_dir / "events.jsonl"
    return events.read_bytes().count(b'"step_finished"') if events.exists() else 0


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_run_survives_the_death_of_every_process(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    argv = command(
        "train",
        f"max_steps={MAX_STEPS}",
        "save_steps=10",
        "max_staleness=2",
        "scheduler.group_timeout_s=30",
        "scheduler.max_untrained_steps=0",  # late groups are often all equal, for many steps
        output_dir=tmp_path,
        exp_name="chaos",
    )
    deadline = time.monotonic() + DEADLINE_S
    process = subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run_dir = tmp_path / "chaos"
    victims = list(VICTIMS)
    chance.shuffle(victims)
    killed = []
    try:
        wait_for_steps(process, run_dir, 1, deadline)
        for victim in victims:
            if not killed_at_random(process, victim, chance, deadline):
                break
            killed.append(victim)
            wait_for_steps(process, run_dir, num_finished(run_dir) + 1, deadline)
        printed, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()  # where it has not ended; its guardian ends the rest
    assert process.returncode == 0, f"CHAOS_SEED={SEED}, killed {killed}:\n{printed}"
    assert sorted(killed) == sorted(VICTIMS), f"CHAOS_SEED={SEED}: the run ended before all were killed"
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
    assert all(times == 1 for times in ledger.settled.values())
    state = json.loads((run_dir / "checkpoints" / f"step_{MAX_STEPS}" / "run_state.json").read_text())
    assert state["step"] == MAX_STEPS
