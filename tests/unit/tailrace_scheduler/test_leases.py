"""Leases: which worker plays an episode."""

from __future__ import annotations

from tailrace_protos.control import EpisodeState, LeaseReport
from tailrace_scheduler.core.leases import WorkerLeases


def test_leases_of_a_silent_worker_expire() -> None:
    leases = WorkerLeases(10.0)
    leases.take("silent", ["1"], 0.0)
    leases.take("alive", ["2"], 0.0)
    leases.heard("alive", 9.0)
    assert leases.expire(10.5) == ["1"]
    assert not leases.holds("1")
    assert leases.holds("2")


def test_a_late_release_of_a_worker_that_lost_the_episode_changes_nothing() -> None:
    leases = WorkerLeases(10.0)
    leases.take("old", ["1"], 0.0)
    leases.take("new", ["1"], 0.0)
    assert leases.report(LeaseReport("old", ("1",)), 0.0) == []
    assert leases.holds("1")
    assert leases.report(LeaseReport("new", ("1",)), 0.0) == ["1"]
    assert len(leases) == 0


def test_a_new_scheduler_takes_over_the_leases_that_workers_tell_of() -> None:
    leases = WorkerLeases(15.0)
    states = (EpisodeState("g0.0", "s0", 40, True), EpisodeState("g0.1", "s0", 7, False))
    for _ in range(2):
        leases.report(LeaseReport("w0", states=states), 100.0)
    assert len(leases) == 2
    leases.report(LeaseReport("w1", states=states[:1]), 100.0)
    assert leases.report(LeaseReport("w0", released=("g0.0", "g0.1")), 100.0) == ["g0.1"]
    assert leases.holds("g0.0"), "another worker plays it now"
    assert leases.expire(116.0) == ["g0.0"]
