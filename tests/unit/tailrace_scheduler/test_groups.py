"""Open groups and their deadlines; lost episodes."""

from __future__ import annotations

import msgspec

from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import EpisodeRedelivered
from tailrace_scheduler.core.decisions import (
    BeginGroups,
    ForgetGroup,
    PublishEpisode,
    Republish,
    SettleMembers,
)
from tailrace_scheduler.core.groups import GroupBook, Reconciler, StoreAudit
from tailrace_scheduler.ports import GroupPlan, StoredGroups
from tests.unit.tailrace_scheduler.simulation import made_settlement
from tests.unit.tailrace_scheduler.test_core_promises import made_run

PLAN = GroupPlan(
    group_id="t1",
    group_index=1,
    phase="train",
    tasks=(EnvTask("A", 1),) * 4,
    deadline_unix_s=100.0,
    min_valid=2,
    step=0,
)


def made_book(*outcomes: Outcome, plan: GroupPlan = PLAN) -> GroupBook:
    book = GroupBook()
    book.add(plan)
    for member in range(len(plan.tasks)):
        book.publish(f"{plan.group_id}.{member}", 0.0)
    for member, outcome in enumerate(outcomes):
        book.settle(made_settlement(plan.group_id, member, outcome))
    return book


def test_a_group_with_enough_valid_members_closes_at_its_deadline_and_cancels_the_rest() -> None:
    book = made_book(Outcome.OK, Outcome.POLICY_FAILURE)
    assert book.due(99.9) == []
    [close] = book.due(100.0)
    assert close[:3] == ("t1", (2, 3), Outcome.CANCELLED)
    assert "2 of 4 members valid" in close.reason


def test_without_enough_valid_members_the_rest_is_a_timeout() -> None:
    [close] = made_book(Outcome.OK, Outcome.INFRA_FAILURE).due(100.0)
    assert close[:3] == ("t1", (2, 3), Outcome.TIMEOUT)


def test_a_group_that_waits_for_an_agent_outside_closes_at_the_deadline_it_gets_by_then() -> None:
    book = made_book()
    book.postpone("t1", 150.0)
    book.postpone("t1", 120.0)
    book.postpone("another", 500.0)
    assert book.due(149.9) == []
    [close] = book.due(150.0)
    assert close[:3] == ("t1", (0, 1, 2, 3), Outcome.TIMEOUT)


def test_a_single_valid_member_is_enough_where_members_are_not_compared() -> None:
    plan = msgspec.structs.replace(PLAN, min_valid=1)
    [close] = made_book(Outcome.OK, plan=plan).due(100.0)
    assert close.outcome is Outcome.CANCELLED


def test_a_close_is_decided_once() -> None:
    book = made_book()
    assert len(book.due(100.0)) == 1
    assert book.due(200.0) == []
    assert book.cancel("train", "over") == []


def test_news_that_come_twice_count_once() -> None:
    book = made_book(Outcome.OK)
    book.settle(made_settlement("t1", 0, Outcome.TIMEOUT))
    assert book.num_unsettled("train") == 3
    book.add(PLAN)
    assert book.num_open("train") == 1
    book.close("t1")
    book.close("t1")
    assert (book.num_open("train"), book.num_unsettled("train")) == (0, 0)


def test_a_groups_time_begins_when_its_last_member_has_a_server() -> None:
    book = GroupBook()
    plan = msgspec.structs.replace(PLAN, timeout_s=100.0)
    book.add(plan)
    for member in range(3):
        assert book.publish(f"t1.{member}", 50.0) is not None
    assert book.due(400.0) == [], "a member waits"
    assert book.num_unsettled("train") == 3
    book.publish("t1.3", 450.0)
    assert book.due(549.9) == []
    [close] = book.due(550.0)
    assert close[:3] == ("t1", (0, 1, 2, 3), Outcome.TIMEOUT)
    assert book.publish("t1.0", 551.0) is None, "it closes"


def test_a_member_that_waits_is_not_lost() -> None:
    book, reconciler = GroupBook(), Reconciler(max_attempts=3)
    book.add(PLAN)
    book.publish("t1.2", 0.0)
    reconciler.compare(book, set(), lambda name: False)
    decided = reconciler.compare(book, set(), lambda name: False)
    assert decided == [Republish(PLAN, 2, "the work queue no longer held it")]


def test_a_group_found_open_after_a_restart_keeps_what_has_settled() -> None:
    book = made_book(plan=msgspec.structs.replace(PLAN, settled={0: Outcome.OK, 2: Outcome.OK}))
    [close] = book.due(100.0)
    assert close[:3] == ("t1", (1, 3), Outcome.CANCELLED)


def test_only_what_is_missing_twice_goes_out_again() -> None:
    book, reconciler = made_book(Outcome.OK), Reconciler(max_attempts=3)
    queued = {"t1.1"}
    assert reconciler.compare(book, queued, lambda name: name == "t1.2") == []
    decided = reconciler.compare(book, queued, lambda name: name == "t1.2")
    assert decided == [Republish(PLAN, 3, "the work queue no longer held it")]


def test_what_was_there_in_between_is_not_lost() -> None:
    book, reconciler = made_book(Outcome.OK, Outcome.OK, Outcome.OK), Reconciler(max_attempts=3)
    for queued in (set[str](), {"t1.3"}, set[str]()):
        assert reconciler.compare(book, queued, lambda name: False) == []
    reconciler.balanced()
    assert reconciler.compare(book, set(), lambda name: False) == []


def test_an_episode_lost_in_every_attempt_settles_as_a_failure_of_the_infrastructure() -> None:
    book, reconciler = made_book(Outcome.OK, Outcome.OK, Outcome.OK), Reconciler(max_attempts=3)
    book.redeliver(EpisodeRedelivered("t1.3", 2, "lost"))
    reconciler.compare(book, set(), lambda name: False)
    [settle] = reconciler.compare(book, set(), lambda name: False)
    assert isinstance(settle, SettleMembers)
    assert settle[:3] == ("t1", (3,), Outcome.INFRA_FAILURE)


def test_a_train_group_begins_once_and_before_its_first_episode_starts() -> None:
    world = made_run(0, max_staleness=1)
    world.beat()
    other = msgspec.structs.replace(PLAN, group_id="e1", phase="eval")
    world.core.adopt([PLAN, other], 2, [], world.now_s)
    decided = [*world.core.decide(world.now_s), *world.core.decide(world.now_s)]
    started = [one.task.episode_id for one in decided if isinstance(one, PublishEpisode)]
    assert started == [f"{group}.{member}" for group in ("t1", "e1") for member in range(4)]
    assert decided[0] == BeginGroups((("t1", 0),))
    assert sum(isinstance(one, BeginGroups) for one in decided) == 1


def test_what_differs_from_the_store_in_two_comparisons_in_a_row_is_lost() -> None:
    book, audit = made_book(), StoreAudit()
    stored = StoredGroups(("t9",), ("t2",))
    assert audit.compare(book, {"t2": 1, "t3": 1}, stored) == []
    assert set(audit.compare(book, {"t2": 1, "t3": 1}, stored)) == {
        ForgetGroup("t1", "train", 4),
        ForgetGroup("t9"),
        ForgetGroup("t3", is_sent=True),
    }
    agreed = StoredGroups(("t1",), ("t2",))
    assert audit.compare(book, {"t2": 1}, agreed) == []
    assert audit.compare(book, {"t2": 1}, stored) == []


def test_a_group_whose_last_trajectory_the_store_has_lost_is_closed_without_it() -> None:
    book, audit = made_book(*[Outcome.OK] * 4), StoreAudit()
    stored = StoredGroups(("t1",), ())
    assert audit.compare(book, {}, stored) == []
    [close] = audit.compare(book, {}, stored)
    assert isinstance(close, SettleMembers)
    assert close[:3] == ("t1", (0, 1, 2, 3), Outcome.INFRA_FAILURE)
