"""Groups at the staleness horizon: closed with what is valid, deferred, or waited for."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.config import RunConfig
from tailrace_protos.control import EpisodeState, LeaseReport
from tailrace_protos.episode import Outcome
from tailrace_protos.event import StepFinished
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import DeferGroups, SettleMembers
from tailrace_scheduler.core.groups import GroupBook
from tailrace_scheduler.core.streaming import StreamDecision, StreamFeed
from tailrace_scheduler.core.streams.decisions import StartEpisode
from tests.unit.tailrace_scheduler.simulation import made_settlement, made_status
from tests.unit.tailrace_scheduler.test_groups import PLAN

SERVER = "inference-0"


class World:
    """A feed with one group of four, of which some have ended, and a learner at step 1."""

    def __init__(self, policy: str, num_ended: int, max_waste: float = 1.0) -> None:
        keys = {"max_staleness": 1, "groups_per_step": 1, "group_size": 4, "stale_groups": policy}
        run = msgspec.convert({"exp_name": "x", **keys}, RunConfig)
        self.feed = StreamFeed(run, SchedulerConfig(tags=("A",), max_waste=max_waste))
        self.now_s = 1000.0
        book = GroupBook()
        book.add(PLAN)
        self.feed.begin(0, book, self.now_s)
        self.feed.heard(made_status(SERVER), self.now_s)
        started = [one for one in self.feed.decide({}, self.now_s) if isinstance(one, StartEpisode)]
        assert [one.server_id for one in started] == [SERVER] * 4
        for context, is_over in ((100, False), (400, True)):
            states = tuple(EpisodeState(f"t1.{n}", SERVER, context, is_over) for n in range(4))
            self.feed.told(LeaseReport("w", states=states), self.now_s)
        for member in range(num_ended):
            self.feed.apply(made_settlement("t1", member), self.now_s)
        self.step(1)

    def step(self, step: int) -> None:
        metrics: dict[str, float | None] = {"num_trained_tokens": 1000.0}
        done = StepFinished("L", step, step, (), 0, 0.0, 0.0, metrics)
        self.feed.apply(done, self.now_s)

    def after(self, seconds: float, places: int = 1) -> list[StreamDecision]:
        """Decisions of so many seconds in which the learner waits."""
        decided: list[StreamDecision] = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.feed.learner_waits(places)
            decided += self.feed.decide({}, self.now_s)
        return decided


def test_a_group_at_the_horizon_closes_with_its_valid_members_while_the_learner_waits() -> None:
    world = World("close", num_ended=2)
    assert world.after(5, places=0) == []
    [close] = world.after(5)
    assert isinstance(close, SettleMembers)
    assert close[:3] == ("t1", (2, 3), Outcome.CANCELLED)
    assert "2 of 4 members valid" in close.reason


def test_a_group_with_too_few_valid_members_is_waited_for_a_step_later() -> None:
    world = World("close", num_ended=1)
    assert world.after(5) == [DeferGroups((("t1", 1),))]
    world.feed.apply(made_settlement("t1", 1), world.now_s)
    world.step(2)
    [close] = world.after(5)
    assert isinstance(close, SettleMembers)


def test_auto_closes_when_waiting_has_cost_more_than_the_aborted_work() -> None:
    patient = World("auto", num_ended=2, max_waste=0.0)
    assert patient.after(600) == [], "nothing may be thrown away"
    world = World("auto", num_ended=2)
    [close] = world.after(600)
    assert isinstance(close, SettleMembers)


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_other_policies_close_nothing(policy: str) -> None:
    assert World(policy, num_ended=3).after(600) == []
