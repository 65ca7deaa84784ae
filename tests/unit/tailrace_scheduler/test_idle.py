"""Idle attribution: every second has one cause, and all of them sum up."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace_protos.control import AgentActivity, ServerState
from tailrace_scheduler.core.idle import (
    ACCOUNTS,
    Activities,
    ActivityCounts,
    IdleLedger,
    Situation,
    engine_cause,
    learner_cause,
)
from tests.unit.tailrace_scheduler.simulation import made_status

NOTHING = ActivityCounts()


def situation(
    blocked_by: str = "", episodes: int = 10, activity: ActivityCounts = NOTHING, has_work: bool = False
) -> Situation:
    return Situation(blocked_by, episodes, activity, 3, has_work)


SERVER = made_status(policy_version=3)


@pytest.mark.parametrize(
    ("now", "engine", "learner"),
    [
        (situation("weights", 0), "weights", "weights"),
        (situation("credit", 0), "credit", "credit"),
        (situation("evaluation", 0), "credit", "credit"),
        (situation("", 0), "transport", "transport"),
        (situation("credit", 9, ActivityCounts(2, 7, 0, 0)), "straggler", "tool"),
        (situation("credit", 9, ActivityCounts(7, 2, 0, 0)), "straggler", "straggler"),
        (situation("", 9, ActivityCounts(1, 7, 1, 0)), "tool", "tool"),
        (situation("credit", 9, ActivityCounts(0, 1, 8, 0)), "reward", "reward"),
        (situation("credit", 9, ActivityCounts(0, 0, 1, 3)), "transport", "transport"),
        (situation("credit", 9, NOTHING), "transport", "transport"),
    ],
)
def test_each_situation_has_its_cause(now: Situation, engine: str, learner: str) -> None:
    assert (engine_cause(now, SERVER), learner_cause(now)) == (engine, learner)


def test_an_engine_without_weights_or_behind_when_they_are_waited_for_waits_for_weights() -> None:
    starting = made_status(state=ServerState.STARTING, policy_version=-1)
    behind = made_status(policy_version=2)
    assert engine_cause(situation("credit", 5), starting) == "weights"
    assert engine_cause(situation("weights", 0), behind) == "weights"
    assert engine_cause(situation("credit", 0), behind) == "credit"


def test_the_learner_waits_only_while_it_has_no_work() -> None:
    ledger = IdleLedger(0.0)
    ledger.tick(situation("credit", 5, ActivityCounts(0, 5, 0, 0)), 2.0)
    ledger.tick(situation("credit", 5, ActivityCounts(5, 0, 0, 0), has_work=True), 10.0)
    ledger.tick(situation("credit", 5, ActivityCounts(0, 0, 5, 0)), 11.0)
    cut = ledger.cut(11.0, learner_busy_s=8.0, num_engines=0)
    assert {name: value for name, value in cut.items() if value} == {
        "tool": 2.0,
        "reward": 1.0,
        "learner": 8.0,
    }


def test_engine_seconds_get_the_cause_that_held_when_they_were_reported() -> None:
    ledger = IdleLedger(0.0)
    tools = situation("credit", 5, ActivityCounts(0, 5, 0, 0))
    ledger.heartbeat(
        tools,
        made_status(idle_s=1.0, busy_s=1.0),
        made_status(policy_version=3, idle_s=2.0, busy_s=4.0),
    )
    cut = ledger.cut(4.0, learner_busy_s=4.0, num_engines=1)
    assert cut["tool"] == pytest.approx(0.5)
    assert cut["engine"] == pytest.approx(1.5)
    assert cut["learner"] == pytest.approx(2.0)


def test_a_server_that_started_anew_counts_from_zero() -> None:
    ledger = IdleLedger(0.0)
    before, after = made_status(idle_s=100.0, busy_s=50.0), made_status(idle_s=0.0, busy_s=2.0)
    ledger.heartbeat(situation(), before, after)
    assert ledger.cut(2.0, 2.0, 1)["engine"] == pytest.approx(1.0)


@example([("tick", 5e-324, 0.0, 0), ("cut", 1.0, 0.0, 0)])  # a share of next to nothing
@example([("beat", 1.0, 52.5, 0), ("cut", 1.0, 0.0, 1)])  # rounding leaves a rest after each taking
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tick", "beat", "cut"]),
            st.floats(0.0, 5.0),
            st.floats(0.0, 5.0),
            st.integers(0, 4),
        ),
        max_size=60,
    )
)
def test_accounts_of_every_interval_sum_to_its_wall_time(
    history: list[tuple[str, float, float, int]],
) -> None:
    ledger = IdleLedger(0.0)
    now_s, cut_s = 0.0, 0.0
    status = made_status(policy_version=3)
    for kind, first, second, number in history:
        now_s += first
        moment = situation("credit" if number % 2 else "", number, ActivityCounts(number, 1, 2, 0))
        if kind == "tick":
            ledger.tick(moment, now_s)
        elif kind == "beat":
            after = made_status(
                policy_version=3, idle_s=status.idle_s + first, busy_s=status.busy_s + second
            )
            ledger.heartbeat(moment, status, after)
            status = after
        else:
            cut = ledger.cut(now_s - cut_s, second, number)
            assert set(cut) == set(ACCOUNTS)
            assert min(cut.values()) >= -1e-9
            assert sum(cut.values()) == pytest.approx(now_s - cut_s, abs=1e-6)
            cut_s = now_s


def test_over_a_run_engine_seconds_are_given_out_as_they_were_reported() -> None:
    ledger = IdleLedger(0.0)
    given_busy_s, status = 0.0, made_status()
    for number in range(1, 101):  # intervals of 0.3 s, heartbeats of 1 s, busy 70%
        now_s = number * 0.3
        if int(now_s) > int(now_s - 0.3):
            after = made_status(idle_s=status.idle_s + 0.3, busy_s=status.busy_s + 0.7)
            ledger.heartbeat(situation("credit", 0), status, after)
            status = after
        given_busy_s += 2 * ledger.cut(0.3, 0.3, 1)["engine"]
    assert given_busy_s == pytest.approx(0.7 * 30.0, abs=1.0)


def test_an_interval_of_many_heartbeats_takes_no_memory_for_each() -> None:
    """Hours may pass between two steps, with thousands of servers."""
    ledger, before, after = IdleLedger(0.0), made_status(), made_status(policy_version=3, idle_s=1.0)
    tools, rewards = (situation("", 9, ActivityCounts(0, *counts, 0)) for counts in ((9, 0), (0, 9)))
    tracemalloc.start()
    for now in (tools, rewards):
        for _ in range(10_000):
            ledger.heartbeat(now, before, after)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 20_000 * 64
    cut = ledger.cut(20_000.0, 20_000.0, 1)
    assert 2 * cut["tool"] == pytest.approx(10_000.0)
    assert 2 * cut["reward"] == pytest.approx(10_000.0)


def test_what_an_engine_waited_for_before_an_interval_is_not_its_cause() -> None:
    """An engine that waited long for its first weights, longer than the first interval knows."""
    ledger = IdleLedger(0.0)
    starting = made_status(state=ServerState.STARTING, idle_s=230.0)
    ledger.heartbeat(situation("credit", 0), made_status(state=ServerState.STARTING), starting)
    assert 2 * ledger.cut(200.0, 200.0, 1)["weights"] == pytest.approx(200.0)
    status = made_status(idle_s=230.0)
    for _ in range(240):  # intervals and heartbeats of 1 s, all of them busy
        after = made_status(idle_s=230.0, busy_s=status.busy_s + 1.0)
        ledger.heartbeat(situation("credit", 0), status, after)
        status = after
        account = ledger.cut(1.0, 1.0, 1)
    assert account["weights"] == 0.0
    assert 2 * account["engine"] == pytest.approx(1.0)


def test_activity_of_a_silent_worker_is_forgotten() -> None:
    activities = Activities(ttl_s=10.0)
    activities.heard(AgentActivity("v", 1, 2, 3, 4, 0.0), 0.0)
    activities.heard(AgentActivity("w", 1, 0, 0, 0, 0.0), 5.0)
    assert activities.counts(6.0) == (2, 2, 3, 4)
    assert activities.counts(12.0) == (1, 0, 0, 0)
