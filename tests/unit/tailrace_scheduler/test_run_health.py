"""Rules that end a run in which nothing can succeed, and what they say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tailrace.config import RunConfig
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    Event,
    EventBody,
    GroupClosed,
    GroupDropped,
    RunFailed,
    StepFinished,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.run_health import Counts, RunHealth, Standing
from tests.unit.tailrace_scheduler.simulation import made_settlement
from tests.unit.tailrace_scheduler.test_core_promises import made_run

WAITING = Standing(Counts(3, 1, 0, 0, 0, 0, "training", "servers"), True, False, False, 0)


class World:
    """A run's health, fed with events; time passes by `now_s`."""

    def __init__(self, *, max_steps: int = 10, **limits: Any) -> None:
        run = RunConfig(exp_name="x", group_size=2, groups_per_step=4, max_steps=max_steps)
        self.now_s = 1000.0
        self.health = RunHealth(run, SchedulerConfig(tags=("A",), **limits), self.now_s)
        self.names = itertools.count()

    def happen(self, body: EventBody) -> None:
        self.health.apply(Event(f"{next(self.names)}-0", self.now_s, "test", body))

    def group(self, outcome: Outcome, reason: str = "", num: int = 1, phase: str = "t") -> None:
        for _ in range(num):
            name = f"{phase}{next(self.names)}"
            for member in range(2):
                settled = made_settlement(name, member, outcome)
                self.happen(_with_reason(settled, reason))
            num_valid = 2 * outcome.is_valid
            self.happen(GroupClosed(name, settled.phase, num_valid, 2, num_valid > 0, 1))

    def step(self, **metrics: float) -> None:
        groups = tuple(f"g{next(self.names)}" for _ in range(4))
        self.happen(StepFinished("L", 1, 1, groups, 0, 0.0, 0.0, {"num_groups": 4.0, **metrics}))

    @property
    def verdict(self) -> RunFailed | None:
        return self.health.verdict(self.now_s, WAITING)


def _with_reason(settled: EpisodeSettled, reason: str) -> EpisodeSettled:
    values = {name: getattr(settled, name) for name in settled.__struct_fields__}
    return EpisodeSettled(**{**values, "reason": reason})


@pytest.mark.parametrize("outcome", [Outcome.INFRA_FAILURE, Outcome.TIMEOUT])
def test_groups_that_all_fail_before_the_first_step_end_the_run(outcome: Outcome) -> None:
    world = World(max_failed_groups=5)
    world.group(outcome, "env.step raised KeyError: 'x1'", num=3, phase="e")
    world.group(outcome, "env.reset raised OSError: 17", num=1)
    assert world.verdict is None
    world.group(outcome, "env.step raised KeyError: 'x2'")
    failed = world.verdict
    assert failed is not None
    assert (failed.rule, failed.service) == ("failed_groups", "agents")
    assert "5 groups in a row" in failed.reason
    assert "8 of the last 10 failures: env.step raised KeyError: 'x2'" in failed.reason


def test_a_valid_group_in_between_begins_the_count_anew_and_zero_never_ends() -> None:
    world = World(max_failed_groups=3)
    world.group(Outcome.INFRA_FAILURE, num=2)
    world.group(Outcome.OK)
    world.group(Outcome.INFRA_FAILURE, num=2)
    assert world.verdict is None
    never = World(max_failed_groups=0)
    never.group(Outcome.INFRA_FAILURE, num=100)
    assert never.verdict is None


def test_after_the_first_step_an_outage_is_borne_for_a_while() -> None:
    world = World(failed_groups_window=10, failed_groups_grace_s=30.0)
    world.step(num_trained_tokens=5.0)
    world.group(Outcome.INFRA_FAILURE, "reward: no route", num=20)
    world.now_s += 29.0
    assert world.verdict is None
    world.now_s += 2.0
    failed = world.verdict
    assert failed is not None
    assert "10 of the last 10 groups failed as a whole, for 31 s" in failed.reason
    assert failed.service == "reward"


def test_an_outage_that_ends_in_time_and_late_groups_end_nothing() -> None:
    world = World(failed_groups_window=10, failed_groups_grace_s=30.0)
    world.step(num_trained_tokens=5.0)
    world.group(Outcome.INFRA_FAILURE, num=20)
    world.now_s += 20.0
    world.group(Outcome.OK, num=1)
    world.now_s += 20.0
    assert world.verdict is None
    world.group(Outcome.TIMEOUT, num=12)
    world.now_s += 60.0
    assert world.verdict is None


EMPTY = {"num_trained_tokens": 0.0}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({**EMPTY, "num_groups_zero_variance": 4.0}, "had the same reward"),
        ({**EMPTY, "num_stale_tokens": 90.0}, "raise max_staleness"),
        ({**EMPTY, "num_nonfinite_tokens": 90.0}, "not finite"),
        ({"num_trained_tokens": 5.0, "num_updates": 2.0, "num_skipped_updates": 2.0}, "learning_rate"),
        (EMPTY, "num_*"),
    ],
)
def test_steps_without_a_trained_token_end_the_run_with_the_cause(
    metrics: dict[str, float], expected: str
) -> None:
    world = World(max_untrained_steps=3)
    world.step(**metrics)
    world.step(**metrics)
    assert world.verdict is None
    world.step(**metrics)
    failed = world.verdict
    assert failed is not None
    assert (failed.rule, failed.service) == ("untrained_steps", "learner")
    assert "of 3 steps" in failed.reason
    assert expected in failed.reason


def test_groups_given_back_count_as_steps_that_were_not_made() -> None:
    world = World(max_untrained_steps=2)
    for _ in range(7):
        world.happen(GroupDropped("g", "zero_variance"))
    assert world.verdict is None
    world.happen(GroupDropped("g", "zero_variance"))
    failed = world.verdict
    assert failed is not None
    assert "in 8 of 8 groups all episodes of a group had the same reward" in failed.reason


def test_a_step_that_trains_or_does_not_tell_begins_the_count_anew() -> None:
    for metrics in ({"num_trained_tokens": 1.0}, {}):
        world = World(max_untrained_steps=2)
        world.step(**EMPTY)
        world.step(**metrics)
        world.step(**EMPTY)
        assert world.verdict is None


def test_a_run_without_progress_ends_and_names_what_it_waits_for() -> None:
    world = World(stall_timeout_s=50.0, group_timeout_s=10.0)
    world.now_s += 59.0
    assert world.verdict is None
    assert "no inference server" in world.health.stall_hint(world.now_s + 2.0, WAITING)[0]
    world.now_s += 2.0
    failed = world.verdict
    assert failed is not None
    assert (failed.rule, failed.service) == ("stall", "inference")
    assert "61 s" in failed.reason


def test_groups_of_which_nothing_is_published_wait_for_workers_or_room() -> None:
    counts = WAITING.counts._replace(num_servers=1, num_groups_running=3)
    service, text = WAITING._replace(is_current=True, counts=counts).waits_for()
    assert (service, "room on an inference server" in text) == ("agents", True)


def test_a_warm_start_is_no_stall() -> None:
    world = World(stall_timeout_s=1.0, group_timeout_s=1.0)
    world.now_s += 9999.0
    warm = WAITING._replace(counts=WAITING.counts._replace(phase="warm_start"))
    assert world.health.verdict(world.now_s, warm) is None
    assert world.health.stall_hint(world.now_s, warm) == []


def test_a_run_that_trained_or_evaluated_nothing_has_failed_at_its_end() -> None:
    world = World()
    world.step(**EMPTY, num_groups_zero_variance=4.0)
    failed = world.health.final_verdict(1)
    assert failed is not None
    assert failed.rule == "trained_nothing"
    world.step(num_trained_tokens=3.0)
    assert world.health.final_verdict(2) is None
    evaluated = World(max_steps=0)
    evaluated.happen(EvaluationFinished("e0", 0, 0.0, 0.0, 0, 4))
    failed = evaluated.health.final_verdict(0)
    assert failed is not None
    assert failed.rule == "evaluated_nothing"


def test_the_scheduler_ends_a_run_whose_groups_all_fail_and_admits_nothing_more() -> None:
    world = made_run(0, max_staleness=1, max_failed_groups=6)
    world.resume(0)
    world.served_version = world.policy_version
    for _ in range(20):
        world.beat()
        world.decide()
        for group_id, group in list(world.open.items()):
            for member in range(len(group.plan.tasks)):
                world.settle(group_id, member, Outcome.INFRA_FAILURE)
    ends = [event.body for event in world.events if isinstance(event.body, RunFailed)]
    assert len(ends) == 1
    status = world.core.status(world.now_s)
    assert (status.phase, status.failed) == ("failed", ends[0])
    assert status.num_failures >= 6
    assert not world.open
    world.restart()  # it is run again: it may succeed now
    assert world.core.status(world.now_s).phase != "failed"
