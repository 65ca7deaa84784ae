"""A disk that fills up mid-run is told with its remedy, loses nothing, and only delays the run.

Needs the right to mount a small tmpfs; skipped elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit import build_ledger, check_ledger
from tests.e2e.processes import log_lines, num_steps, running
from tests.e2e.runs import command, run
from tests.world.disk import fill, small_disk

MAX_STEPS = 25  # far more than happen before the disk is full
STUCK_FOR_S = 15.0  # no step for so long counts as waiting


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, of 320 MiB."""
    with small_disk(tmp_path / "disk", 320) as folder:
        yield folder


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("redis_fsync", ["everysec", "always"])
def test_a_run_waits_while_its_disk_is_full_and_goes_on_when_there_is_room(
    disk: Path, tmp_path: Path, redis_fsync: str
) -> None:
    argv = command(
        "train",
        f"max_steps={MAX_STEPS}",
        "save_steps=20",
        "max_staleness=2",
        "stale_groups=mask",  # closes no group early: every episode ends by itself
        "cluster.min_free_disk_bytes=1000000",
        f"cluster.redis_fsync={redis_fsync}",
        output_dir=disk,
        exp_name="cramped",
    )
    run_dir, ballast = disk / "cramped", disk / "ballast"
    with running(argv, tmp_path / "printed") as training:
        training.wait_until(lambda: num_steps(run_dir) >= 3)
        steps, since = -1, time.monotonic()

        def is_stuck() -> bool:
            nonlocal steps, since
            fill(ballast)
            now = num_steps(run_dir)
            if now != steps:
                steps, since = now, time.monotonic()
            return time.monotonic() - since > STUCK_FOR_S and "is full" in training.printed

        training.wait_until(is_stuck, 240.0)
        assert steps < MAX_STEPS
        assert "free some space" in training.printed
        os.unlink(ballast)
        assert training.ends(400.0) == 0, training.printed
        assert "has room again" in training.printed
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
    assert set(ledger.admitted) == set(ledger.closed), "every group was played to its end"
    assert {one["outcome"] for one in ledger.of_type("episode_settled")} == {"ok"}
    said = {str(line.get("event")) for line in log_lines(run_dir)}
    assert said & {"redis has room again", "redis is back"}, said


def test_too_little_room_at_the_start_is_refused_with_the_remedy(disk: Path) -> None:
    wanted = "cluster.min_free_disk_bytes=1000000000"
    result = run(command("train", wanted, output_dir=disk, exp_name="nowhere"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "MiB free" in result.stderr
    assert "choose another output_dir" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_disk_without_any_room_at_the_start_is_refused_with_the_remedy(disk: Path) -> None:
    fill(disk / "ballast")
    result = run(command("train", output_dir=disk, exp_name="nowhere"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "free some space" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
