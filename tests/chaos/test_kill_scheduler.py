"""SIGKILL for the scheduler of a run, twenty times: nothing is lost, played or trained twice."""

from __future__ import annotations

import signal

import pytest

from benchmarks.live_run import training
from tests.audit import Ledger, build_ledger, check_ledger
from tests.e2e.runs import SMALL

DEATHS = 20


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    folder = tmp_path_factory.mktemp("scheduler")
    with training(folder, *SMALL) as run:
        run.wait_for_steps(3, deadline_s=180.0)
        for _ in range(DEATHS):
            run.signal("scheduler", signal.SIGKILL)
            run.wait_for_steps(2, deadline_s=90.0)
    return build_ledger(folder / "recovery")


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_each_death_had_a_successor_and_the_audit_balances(ledger: Ledger) -> None:
    assert len(ledger.of_type("run_started")) == 1 + DEATHS
    check_ledger(ledger)


@pytest.mark.heavy
def test_no_episode_is_played_again_because_the_scheduler_died(ledger: Ledger) -> None:
    assert ledger.of_type("episode_redelivered") == []
    outcomes = {body["outcome"] for body in ledger.of_type("episode_settled")}
    assert outcomes <= {"ok", "policy_failure", "cancelled"}, "workers went on playing"
