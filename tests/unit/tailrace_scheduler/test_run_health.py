"""Rules that end a run in which nothing can succeed, and what they say."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from tailrace.config import RunConfig
from tailrace.sdk.policy import GenerationFailedError
from tailrace_protos.control import AgentActivity
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EvaluationFinished,
    Event,
    EventBody,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    TagEvaluation,
    TaskSolved,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import Emit
from tailrace_scheduler.core.health import CONFIRMED_S, EpisodeRoom
from tailrace_scheduler.core.run_health import Counts, RunHealth, Standing, alike_text
from tailrace_scheduler.core.run_log import Rows
from tailrace_scheduler.core.scheduler import SchedulerCore
from tests.unit.tailrace_scheduler.simulation import SimulatedRun, made_settlement, made_status
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
                self.happen(replace(made_settlement(name, member, outcome), reason=reason))
            num_valid = 2 * outcome.is_valid
            self.happen(
                GroupClosed(name, "eval" if phase == "e" else "train", num_valid, 2, num_valid > 0, 1)
            )

    def equal_groups(self, num: int, reward: float, **told: Any) -> tuple[str, ...]:
        """Training groups whose episodes all have this reward; returns their names."""
        names = tuple(f"t{next(self.names)}" for _ in range(num))
        for name in names:
            for member in range(2):
                self.happen(replace(made_settlement(name, member, reward=reward), **told))
            self.happen(GroupClosed(name, "train", 2, 2, True, 1))
        return names

    def given_back(self, num: int, reward: float, **told: Any) -> None:
        for name in self.equal_groups(num, reward, **told):
            self.happen(GroupDropped(name, "zero_variance"))

    def step(self, **metrics: float) -> None:
        groups = tuple(f"g{next(self.names)}" for _ in range(4))
        self.happen(StepFinished("L", 1, 1, groups, 0, 0.0, 0.0, {"num_groups": 4.0, **metrics}))

    @property
    def solved(self) -> TaskSolved | None:
        return self.health.solved("L", 3)

    @property
    def verdict(self) -> RunFailed | None:
        return self.health.verdict(self.now_s, WAITING)


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


def test_failures_that_differ_by_the_id_of_a_call_are_one_kind() -> None:
    """Ids of calls are hexadecimal, so that equal failures differ by letters, too."""
    world = World(max_failed_groups=160)
    numbers = random.Random(7)
    for _ in range(110):
        call_id = f"train-3.0.2.{numbers.getrandbits(40):x}"
        world.group(Outcome.INFRA_FAILURE, str(GenerationFailedError(call_id, 10, "silent")))
    world.group(Outcome.INFRA_FAILURE, "env.step raised KeyError: 'face'", num=50)
    failed = world.verdict
    assert failed is not None
    assert "220 of the last 320 failures: generation " in failed.reason
    assert alike_text("no answer within 2000 s of 0x7f3a, face 12 of deadbeef") == (
        "no answer within # s of #, face # of deadbeef"
    )


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
        ({"num_trained_tokens": 5.0, "num_signal_tokens": 0.0, "num_updates": 2.0}, "the same reward"),
        ({**EMPTY, "num_stale_tokens": 90.0}, "raise max_staleness"),
        ({**EMPTY, "num_nonfinite_tokens": 90.0}, "not finite"),
        ({"num_trained_tokens": 5.0, "num_updates": 2.0, "num_skipped_updates": 2.0}, "learning_rate"),
        (
            {
                "num_trained_tokens": 5.0,
                "num_updates": 2.0,
                "num_skipped_updates": 2.0,
                "num_nonfinite_ref_tokens": 5.0,
            },
            "learner.reference",
        ),
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


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"num_trained_tokens": 5.0, "num_updates": 1.0, "num_skipped_updates": 1.0}, "not finite"),
        ({**EMPTY, "num_groups": 4.0, "num_nonfinite_tokens": 9.0}, "engine's log-probabilities"),
    ],
)
def test_groups_of_equal_rewards_hide_no_fault_that_is_as_common(
    metrics: dict[str, float], expected: str
) -> None:
    world = World(max_untrained_steps=2)
    for _ in range(4):
        world.happen(GroupDropped("g", "zero_variance"))
    world.step(**metrics)
    failed = world.verdict
    assert failed is not None
    assert "in 4 of 8 groups" in failed.reason
    assert expected in failed.reason


def test_a_step_half_of_equal_groups_names_what_masked_the_other_half() -> None:
    world = World(max_untrained_steps=1)
    halves = {"num_groups": 4.0, "num_groups_zero_variance": 2.0, "num_nonfinite_tokens": 9.0}
    world.step(**{**EMPTY, **halves})
    failed = world.verdict
    assert failed is not None
    assert "engine's log-probabilities were not finite" in failed.reason


def test_a_step_that_trains_or_does_not_tell_begins_the_count_anew() -> None:
    trained = {"num_trained_tokens": 1.0}
    for metrics in (trained, {**trained, "num_signal_tokens": 1.0}, {}):
        world = World(max_untrained_steps=2)
        world.step(**EMPTY)
        world.step(**metrics)
        world.step(**EMPTY)
        assert world.verdict is None


@pytest.mark.parametrize(
    ("reward", "told"),
    [(1.0, {}), (0.3, {"success": 1.0, "reports_success": True})],
)
def test_equal_groups_in_which_everything_succeeds_solve_the_task(
    reward: float, told: dict[str, Any]
) -> None:
    world = World(max_untrained_steps=2)
    world.given_back(7, reward, **told)
    assert (world.solved, world.verdict) == (None, None)
    world.given_back(1, reward, **told)
    assert world.verdict is None
    solved = world.solved
    assert solved is not None
    assert (solved.lineage, solved.step, solved.num_groups) == ("L", 3, 8)
    assert "all episodes of the last 8 groups succeeded" in solved.reason


def test_steps_of_groups_in_which_everything_succeeds_solve_the_task() -> None:
    world = World(max_untrained_steps=2)
    for _ in range(2):
        groups = world.equal_groups(4, 1.0)
        metrics = {**EMPTY, "num_groups": 4.0, "num_groups_zero_variance": 4.0}
        world.happen(StepFinished("L", 1, 1, groups, 0, 0.0, 0.0, metrics))
    assert world.verdict is None
    assert world.solved is not None


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (0.0, {}),
        (0.1, {"success": 1.0}),  # it only says that the reward is positive
        (1.0, {"success": 0.5, "reports_success": True}),
    ],
)
def test_one_equal_group_that_does_not_succeed_leaves_the_run_a_failure(
    reward: float, told: dict[str, Any]
) -> None:
    world = World(max_untrained_steps=2)
    world.given_back(1, reward, **told)
    world.given_back(7, 1.0)
    assert world.solved is None
    failed = world.verdict
    assert failed is not None
    assert failed.rule == "untrained_steps"


def test_a_few_tasks_that_always_fail_leave_the_others_solved() -> None:
    world = World(max_untrained_steps=5)
    world.given_back(1, 0.0)
    world.given_back(19, 1.0)
    solved = world.solved
    assert solved is not None
    assert "all episodes of 19 of the last 20 groups succeeded" in solved.reason
    assert world.verdict is None


def test_a_step_that_trains_begins_the_count_of_solved_groups_anew() -> None:
    world = World(max_untrained_steps=2)
    world.given_back(1, 0.0)
    world.step(num_trained_tokens=5.0)
    world.given_back(8, 1.0)
    assert world.solved is not None


@pytest.mark.parametrize(
    ("sampled", "greedy", "has_failed"), [(0.95, 0.2, False), (0.2, 0.9, False), (0.7, 0.8, True)]
)
def test_a_solved_task_is_a_failure_if_the_final_evaluation_says_otherwise(
    sampled: float, greedy: float, has_failed: bool
) -> None:
    world = World()
    world.happen(LearnerResumed("L", 0, 0, ""))
    world.step(**EMPTY, num_groups_zero_variance=4.0)  # it needs no training
    world.happen(TaskSolved("L", 1, 200, "the task is solved"))
    means = TagEvaluation(greedy, 0.0, 4)
    world.happen(EvaluationFinished("e1", 1, sampled, 0.0, 4, 8, greedy=means))
    failed = world.health.final_verdict(1)
    assert (failed is not None) == has_failed
    text = world.health.finish() if failed is None else failed.reason
    assert text.startswith("the task is solved; ")
    assert f"success of the final evaluation: {sampled:.3f} sampled, {greedy:.3f} greedy" in text


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
    world.step(num_trained_tokens=3.0, num_signal_tokens=0.0, num_updates=1.0)  # near the reference
    failed = world.health.final_verdict(2)
    assert failed is not None
    assert failed.rule == "trained_nothing"
    world.step(num_trained_tokens=3.0, num_signal_tokens=1.0)
    assert world.health.final_verdict(3) is None
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


@pytest.mark.parametrize(("longest", "is_refused"), [(63, True), (64, False), (0, False)])
def test_a_server_that_cannot_hold_the_longest_episode_ends_the_run_in_its_first_steps(
    longest: int, is_refused: bool
) -> None:
    world = made_run(0, max_staleness=1)
    world.resume(0)
    world.served_version = world.policy_version
    for _ in range(2):
        world.core.on_activity(AgentActivity("w", 0, 0, 0, 0, 0.0, context_limit=64), world.now_s)
    for _ in range(2):  # one message may be anybody's
        assert not [event for event in world.events if isinstance(event.body, RunFailed)]
        status = made_status(heartbeat_unix_s=world.now_s)
        world.core.on_status(replace(status, max_sequence_tokens=longest), world.now_s)
        world.decide()
        world.now_s += CONFIRMED_S
    ends = [event.body for event in world.events if isinstance(event.body, RunFailed)]
    assert bool(ends) == is_refused
    for failed in ends:
        assert (failed.rule, failed.service) == ("short_sequences", "inference")
        assert "inference-0 takes sequences of at most 63 tokens" in failed.reason
        assert "64 (agents.max_episode_tokens)" in failed.reason


def test_a_server_that_comes_later_with_shorter_sequences_ends_no_run() -> None:
    world = World()
    for _ in range(3):
        world.step(num_trained_tokens=5.0)
    assert world.health.verdict(world.now_s, WAITING._replace(short_server="short")) is None


def test_a_run_that_is_resumed_with_shorter_sequences_ends() -> None:
    """A restart of the scheduler alone is no new experiment."""
    world, short = World(), WAITING._replace(short_server="short")
    world.happen(RunStarted("x", "long"))
    for _ in range(3):
        world.step(num_trained_tokens=5.0)
    world.happen(RunStarted("x", "long"))
    assert world.health.verdict(world.now_s, short) is None
    world.happen(RunStarted("x", "short"))
    failed = world.health.verdict(world.now_s, short)
    assert failed is not None
    assert failed.rule == "short_sequences"


def test_one_message_of_a_stranger_makes_no_server_short() -> None:
    room, status = EpisodeRoom(), replace(made_status(), max_sequence_tokens=63)
    for limit in (64, 1 << 30, 64, 64):  # the second one is forged
        room.worker_said(limit)
    now_s = status.heartbeat_unix_s
    forged = replace(status, max_sequence_tokens=5, heartbeat_unix_s=now_s + 9.0)
    for seen in (replace(status, max_sequence_tokens=64), forged):
        assert not room.short_server([seen])
    assert not room.short_server([replace(status, heartbeat_unix_s=now_s + 10.0)])
    short = room.short_server([replace(status, heartbeat_unix_s=now_s + 11.0)])
    assert "at most 63 tokens" in short
    assert "may have 64 " in short


def solved_world() -> SimulatedRun:
    """A run after two steps; everything succeeds, and later groups are given back."""
    world = made_run(0, max_staleness=1, max_steps=20, max_untrained_steps=2)
    world.reward = 1.0
    world.resume(0)
    while world.step < 2:
        play(world)
        world.make_step()
    for _ in range(60):
        play(world)
        if world.ended_lineage:
            return world
        while world.ready:
            world.drop("zero_variance")
    pytest.fail("the scheduler does not end the training")


def play(world: SimulatedRun) -> None:
    world.now_s += 0.1
    world.served_version = world.policy_version
    world.beat()
    world.decide()
    world.play_all()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_solved_run_ends_with_a_checkpoint_a_full_evaluation_and_a_marked_row(restarts: bool) -> None:
    world = solved_world()
    assert world.core.status(world.now_s).phase == "finishing"
    for _ in range(30):
        play(world)
        if restarts:
            world.restart()
        world.end_training()
    ends = [event.body for event in world.events if isinstance(event.body, RunFinished | RunFailed)]
    assert len(ends) == 1
    assert isinstance(ends[0], RunFinished)
    assert "success of the final evaluation: 1.000 sampled" in ends[0].reason
    assert (ends[0].step, world.saved_step, world.step) == (2, 2, 2)
    status = world.core.status(world.now_s)
    assert (status.phase, status.ended_early) == ("finished", ends[0].reason)
    evaluated = [event.body for event in world.events if isinstance(event.body, EvaluationFinished)]
    assert [(one.step, one.num_episodes) for one in evaluated] == [(0, 4), (2, 2), (2, 4)]
    rows = Rows(world.changes)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["task_solved"], rows[-1]["eval/success_rate"]) == (1, 1.0)
    assert "task_solved" not in rows[-2]
    assert not world.open


def test_a_learner_that_resumes_takes_the_end_of_a_solved_run_back() -> None:
    world = solved_world()
    play(world)
    world.resume(0)
    for _ in range(3):
        play(world)
    assert world.core.status(world.now_s).phase == "training"
    assert world.make_step()


@pytest.mark.parametrize(("resume", "phase"), [(False, "finished"), (True, "training")])
def test_only_a_run_that_is_resumed_goes_on_after_its_task_was_solved(resume: bool, phase: str) -> None:
    world = solved_world()
    for _ in range(30):
        play(world)
        world.end_training()
    assert world.core.is_finished
    world.run = replace(world.run, resume_from_checkpoint=resume)
    world.restart()
    assert world.core.status(world.now_s).phase == phase


def test_a_failing_window_of_before_a_restart_has_its_whole_grace_again() -> None:
    world = World(failed_groups_window=10, failed_groups_grace_s=30.0)
    world.step(num_trained_tokens=1.0)
    world.group(Outcome.INFRA_FAILURE, "no server", num=10)
    world.now_s += 3600.0  # nobody watched
    world.health.begin(world.now_s)
    assert world.verdict is None
    world.now_s += 31.0
    failed = world.verdict
    assert failed is not None
    assert failed.rule == "failed_groups"


def test_a_redis_whose_clock_differs_does_not_stall_the_run() -> None:
    run = RunConfig(exp_name="x", group_size=2, max_steps=10)
    config = SchedulerConfig(tags=("A",), stall_timeout_s=100.0, group_timeout_s=100.0)
    core = SchedulerCore(run, config, 10_000.0)
    core.adopt([], 0, [], 10_000.0)
    core.on_event(Event("1-0", 1.0, "learner", LearnerResumed("L", 0, 0, "")), 10_000.0)
    core.on_event(Event("2-0", 2.0, "agents", made_settlement("t0", 0, Outcome.OK)), 10_150.0)
    assert not [one for one in core.decide(10_290.0) if isinstance(one, Emit)]
    (failed,) = [one for one in core.decide(10_360.0) if isinstance(one, Emit)]
    assert isinstance(failed.body, RunFailed)
    assert failed.body.rule == "stall"
