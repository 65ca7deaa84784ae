"""SIGKILL for a rank in a step and for the learner in a checkpoint's write: the run goes on by itself.

Two ranks train, are killed, and are resumed by a learner of one rank: the curve of the loss has every
step once, and no group is lost or trained twice.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.audit import build_ledger, check_ledger
from tests.chaos.test_kill_everything import num_finished, wait_for_steps
from tests.e2e.runs import command, environment

DEADLINE_S = 900.0
STEPS_AFTER_RESUME = 10
PRINTED = "printed.txt"
SETTINGS = (
    "save_steps=3",
    "max_staleness=2",
    "scheduler.group_timeout_s=30",
    "scheduler.max_untrained_steps=0",  # late groups are often all equal, for many steps
    "learner.save_total_limit=3",
)


@contextmanager
def running(folder: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """`tailrace train`, ended as Ctrl-C ends it unless it has ended."""
    argv = command("train", *SETTINGS, *settings, output_dir=folder, exp_name="ranks")
    with (folder / PRINTED).open("ab") as printed:
        process = subprocess.Popen(argv, env=environment(), stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=120)


def newest_step(run_dir: Path) -> int:
    """Of the checkpoints that are complete."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return max(int(name.removeprefix("step_")) for name in names)


def wait_for_rank(process: subprocess.Popen[bytes], rank: str, deadline: float) -> psutil.Process:
    """The process of one rank of the learner, as soon as there is one; its parent is the launcher."""
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before the kill"
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if "tailrace_learner" in child.cmdline() and child.environ().get("RANK") == rank:
                    return child
            except psutil.Error:
                continue
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank} never ran")


def kill_rank(process: subprocess.Popen[bytes], rank: str, deadline: float) -> None:
    """SIGKILL for one rank of the learner."""
    victim = wait_for_rank(process, rank, deadline)
    victim.kill()
    psutil.wait_procs([victim], timeout=60)


def kill_in_a_write(process: subprocess.Popen[bytes], run_dir: Path, deadline: float) -> Path:
    """SIGKILL for the whole learner while a checkpoint is half written; the torn folder."""
    checkpoints = run_dir / "checkpoints"
    while time.monotonic() < deadline:
        launcher = wait_for_rank(process, "0", deadline).parent()
        while launcher is not None and launcher.is_running() and time.monotonic() < deadline:
            torn = next(checkpoints.glob(".part-*"), None)
            if torn is None:
                time.sleep(0.001)
                continue
            launcher.kill()
            psutil.wait_procs([launcher], timeout=60)
            if torn.exists():
                return torn
    raise TimeoutError("no checkpoint was caught half written")


@pytest.mark.heavy
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_run_survives_the_death_of_a_rank_and_of_a_half_written_checkpoint(tmp_path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    run_dir = tmp_path / "ranks"
    with running(tmp_path, "max_steps=100000", "learner.strategy_args.num_ranks=2") as process:
        wait_for_steps(process, run_dir, 4, deadline)
        kill_rank(process, "1", deadline)
        wait_for_steps(process, run_dir, num_finished(run_dir) + 2, deadline)
        torn = kill_in_a_write(process, run_dir, deadline)
        wait_for_steps(process, run_dir, num_finished(run_dir) + 4, deadline)
        assert not torn.exists(), "the next learner sweeps what was half written"
    logs = (run_dir / "logs" / "learner.log").read_text()
    assert logs.count('"rank joined"') >= 2 * 3
    max_steps = newest_step(run_dir) + STEPS_AFTER_RESUME
    with running(tmp_path, f"max_steps={max_steps}", "resume_from_checkpoint=true") as process:
        process.wait(timeout=max(1.0, deadline - time.monotonic()))
        assert process.returncode == 0, (tmp_path / PRINTED).read_text()[-5000:]
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == max_steps
    assert all(times == 1 for times in ledger.settled.values())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["step"]}
    assert sorted(losses) == list(range(1, max_steps + 1))
    known = [loss for loss in losses.values() if loss is not None]  # unknown: nothing to learn from
    assert known
    assert all(math.isfinite(loss) for loss in known)
