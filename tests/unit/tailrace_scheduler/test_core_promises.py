"""The core against random histories: whatever happens, its promises hold and the run ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config import EvaluationArgs, RunConfig
from tailrace_protos.control import AgentActivity
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    GroupAdmitted,
    GroupClosed,
    LearnerResumed,
    StepFinished,
    WarmStartAdvanced,
    WeightsPublished,
)
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import AdmitGroup
from tailrace_scheduler.core.run_log import METRIC_KEYS, Rows
from tailrace_scheduler.core.scheduler import SchedulerCore
from tests.unit.tailrace_scheduler.simulation import SimulatedRun

OUTCOMES = [*[Outcome.OK] * 6, Outcome.POLICY_FAILURE, Outcome.INFRA_FAILURE, Outcome.TIMEOUT]


def made_run(
    seed: int,
    max_staleness: int,
    group_size: int = 3,
    max_steps: int = 5,
    evaluations: dict[str, EvaluationArgs] | None = None,
    **settings: Any,
) -> SimulatedRun:
    run = RunConfig(
        exp_name="x",
        seed=seed,
        max_steps=max_steps,
        eval_steps=2,
        group_size=group_size,
        groups_per_step=3,
        max_staleness=max_staleness,
        evaluations=evaluations or {},
    )
    config = SchedulerConfig(
        tags=("A", "B"),
        eval_groups=4,
        eval_interim_groups=2,
        group_timeout_s=30.0,
        max_buffered_groups=7,
        **settings,
    )
    return SimulatedRun(run, config, seed)


def act(world: SimulatedRun) -> None:
    """One thing happens, chosen at random."""
    choice = world.random.random()
    if choice < 0.6 and world.open:
        group = world.random.choice(list(world.open.values()))
        member = world.random.randrange(len(group.plan.tasks))
        world.play(group.plan.group_id, member, world.random.choice(OUTCOMES))
    elif choice < 0.7:
        world.make_step()
    elif choice < 0.78:
        world.served_version = world.policy_version
    elif choice < 0.8:
        world.drop()
    elif choice < 0.82:
        world.save()
    elif choice < 0.83:
        world.resume(world.saved_step)
    elif choice < 0.84:
        world.restart()
    world.now_s += world.random.random()
    world.beat()
    world.decide()


def play_to_the_end(world: SimulatedRun, num_wild: int) -> None:
    """A wild part, then a world that does its work until the run is over."""
    world.resume(0)
    for _ in range(num_wild):
        act(world)
    for _ in range(600):
        if world.core.is_finished:
            return
        world.served_version = world.policy_version
        world.beat()
        world.decide()
        world.play_all()
        world.make_step()
        if world.step == world.run.max_steps:
            world.save()
        world.now_s += 0.1
    pytest.fail(f"the run does not end: {world.core.status(world.now_s)}")


def tag_means(world: SimulatedRun, evaluation_id: str) -> dict[str, float | None]:
    """Expected values of an evaluation's tags, which take turns; success is the reward."""
    means: dict[str, float | None] = {}
    for place, tag in enumerate(("A", "B")):
        bodies = [e.body for e in world.events if isinstance(e.body, EpisodeSettled)]
        played = [one for one in bodies if one.group_id.startswith(f"{evaluation_id}.")]
        of_tag = [one for one in played if int(one.group_id.split(".")[1]) % 2 == place]
        rewards = [one.reward for one in of_tag if one.outcome.is_valid]
        mean = sum(rewards) / len(rewards) if rewards else None
        means |= {f"eval/tag/{tag}/{name}": mean for name in ("success_rate", "reward_mean")}
    return means


def train_groups(world: SimulatedRun) -> list[str]:
    """Training groups that the world may admit now, in their order."""
    decided = [one.plan for one in world.core.decide(world.now_s) if isinstance(one, AdmitGroup)]
    return [plan.group_id for plan in decided if plan.phase == "train"]


def trained_world() -> SimulatedRun:
    """Asynchronous by one step: the first evaluation is done, and six groups run."""
    world = made_run(0, max_staleness=1)
    world.resume(0)
    for _ in range(100):
        world.served_version = world.policy_version
        world.now_s += 1.0
        world.beat()
        world.decide()
        if any(group.plan.phase == "train" for group in world.open.values()):
            world.decide()
            return world
        world.play_all()
    pytest.fail("no training group is admitted")


def test_a_group_whose_end_comes_to_light_after_a_restart_counts_against_the_credit() -> None:
    world = trained_world()
    log = list(world.events)
    world.play_all()
    late = [one.body for one in world.events[len(log) :] if isinstance(one.body, GroupClosed)]
    assert len(late) == 6
    world.core = SchedulerCore(world.run, world.config, world.now_s)
    world.core.replay(log, world.now_s)
    world.core.adopt([], world.next_index, [], world.now_s)
    world.beat()
    for number, body in enumerate(late):
        world.core.on_event(Event(f"late-{number}", world.now_s, "test", body), world.now_s)
    assert train_groups(world) == []
    assert world.core.status(world.now_s).blocked_by == "credit"


def test_a_step_of_a_lineage_that_did_not_survive_frees_no_credit() -> None:
    world = trained_world()
    world.play_all()
    used, lineage = tuple(world.ready[:3]), f"L{world.lineage}"
    world.resume(0)
    world.served_version = world.policy_version
    world.beat()
    world.happen(StepFinished(lineage, 1, 9, used, 0, 0.0, 0.0, {}))
    assert train_groups(world) == []
    assert world.make_step()
    world.served_version = world.policy_version
    world.beat()
    assert len(train_groups(world)) == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 150), st.sampled_from([1, 3]))
def test_every_history_ends_with_credit_kept_and_books_balanced(
    seed: int, max_staleness: int, num_wild: int, group_size: int
) -> None:
    world = made_run(seed, max_staleness, group_size)
    play_to_the_end(world, num_wild)

    settled = Counter(e.body.episode_id for e in world.events if isinstance(e.body, EpisodeSettled))
    admitted = [e.body for e in world.events if isinstance(e.body, GroupAdmitted)]
    assert set(settled.values()) == {1}
    assert sum(body.num_members for body in admitted) == len(settled)
    assert len({body.group_id for body in admitted}) == len(admitted)
    assert not world.open
    assert Counter(world.trained.values()) == dict.fromkeys(range(1, 6), 3)
    rows = Rows(world.changes)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    tagged = {key for row in rows for key in row if key.startswith("eval/tag/")}
    assert all(set(row) - tagged == set(METRIC_KEYS) for row in rows)
    results = {e.body.step: e.body for e in world.events if isinstance(e.body, EvaluationFinished)}
    for row in rows:
        result = results.get(row["step"])
        assert (result is not None) == (row["step"] in (0, 2, 4, 5))
        expected = result.success_rate if result is not None and result.num_valid else None
        assert row["eval/success_rate"] == expected
        assert {key: row[key] for key in tagged & set(row)} == (
            {} if result is None else tag_means(world, result.evaluation_id)
        )
    started = [e.body.evaluation_id for e in world.events if isinstance(e.body, EvaluationStarted)]
    finished = [e.body.evaluation_id for e in world.events if isinstance(e.body, EvaluationFinished)]
    assert len(set(started)) == len(started)
    assert len(set(finished)) == len(finished)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 120))
def test_a_replay_of_the_log_gives_the_rows_that_were_written(
    seed: int, max_staleness: int, num_wild: int
) -> None:
    world = made_run(seed, max_staleness)
    play_to_the_end(world, num_wild)
    again = made_run(seed, max_staleness)
    replayed = again.core.replay(world.events, world.now_s)
    keys = [key for key in METRIC_KEYS if not key.startswith(("idle/", "busy/"))]
    assert [[row[key] for key in keys] for row in replayed] == [
        [row[key] for key in keys] for row in Rows(world.changes)
    ]
    assert again.core.is_finished


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_idle_and_busy_seconds_of_every_row_sum_to_its_wall_time(seed: int, max_staleness: int) -> None:
    world = made_run(seed, max_staleness)
    play_to_the_end(world, 0)
    before_s = 0.0
    for row in Rows(world.changes):
        seconds = [row[key] for key in METRIC_KEYS if key.startswith(("idle/", "busy/"))]
        assert min(seconds) >= 0.0
        assert sum(seconds) == pytest.approx(row["time_s"] - before_s)
        before_s = row["time_s"]


def test_the_status_has_the_progress_of_the_warm_start() -> None:
    world = made_run(0, 2)
    world.happen(WarmStartAdvanced(3, 40, 0.5))
    status = world.core.status(world.now_s)
    assert (status.warm_start_step, status.warm_start_num_steps) == (3, 40)


def test_training_begins_only_after_the_first_evaluation_has_its_result() -> None:
    world = made_run(0, 2)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    assert {group.plan.phase for group in world.open.values()} == {"eval"}
    assert world.core.status(world.now_s).phase == "evaluating"
    world.play_all()
    world.decide()
    world.decide()
    assert [group.plan.phase for group in world.open.values()] == ["train"] * 7
    assert world.core.status(world.now_s).blocked_by == "buffer"


@pytest.mark.parametrize(
    ("settings", "tags"),
    [
        ({}, ["A", "B", "A", "B"]),
        ({"eval_tags": ("C",)}, ["C", "C", "C", "C"]),
        ({"eval_num_groups_partition": (3, 1)}, ["A", "A", "A", "B"]),
        ({"eval_tags": ("C", "D"), "eval_num_groups_partition": (1, 3)}, ["C", "D", "D", "D"]),
    ],
)
def test_an_evaluation_plays_its_tags_by_their_shares(settings: Any, tags: list[str]) -> None:
    world = made_run(0, 2, **settings)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    assert [group.plan.tasks[0].env_name for group in world.open.values()] == tags


@pytest.mark.parametrize("eval_group_size", [1, 3])
def test_every_evaluation_task_is_played_so_often(eval_group_size: int) -> None:
    world = made_run(0, 2, eval_group_size=eval_group_size)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    assert [len(group.plan.tasks) for group in world.open.values()] == [eval_group_size] * 4
    for group in list(world.open.values()):
        assert all(task == group.plan.tasks[0] for task in group.plan.tasks)
        for member in range(eval_group_size):
            world.settle(group.plan.group_id, member, Outcome.OK)
    world.decide()
    (done,) = [e.body for e in world.events if isinstance(e.body, EvaluationFinished)]
    assert done.num_valid == done.num_episodes == 4 * eval_group_size


def test_a_greedy_evaluation_plays_every_task_once_more_and_keeps_its_result_apart() -> None:
    world = made_run(0, 2, eval_group_size=2, eval_greedy=True)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    plans = [group.plan for group in world.open.values()]
    assert [len(plan.tasks) for plan in plans] == [2, 1] * 4
    assert [plan.tasks[0].greedy for plan in plans] == [False, True] * 4
    assert all(plans[at].tasks[0].seed == plans[at + 1].tasks[0].seed for at in range(0, 8, 2))
    for plan in plans:
        for member, task in enumerate(plan.tasks):
            outcome = Outcome.OK if task.greedy else Outcome.INFRA_FAILURE
            world.settle(plan.group_id, member, outcome)
    world.decide()
    (done,) = [e.body for e in world.events if isinstance(e.body, EvaluationFinished)]
    assert (done.num_episodes, done.num_valid) == (12, 0)
    assert done.greedy is not None
    assert done.greedy.num_valid == 4
    assert {tag: means.num_valid for tag, means in done.greedy_tags.items()} == {"A": 2, "B": 2}


@pytest.mark.parametrize(
    ("settings", "shares"),
    [({}, {"A": 2, "B": 2}), ({"num_groups_partition": (1, 3)}, {"A": 1, "B": 3})],
)
def test_training_plays_its_tags_by_their_shares(settings: Any, shares: dict[str, int]) -> None:
    world = made_run(0, 2, **settings)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    for group in list(world.open.values()):
        world.settle(group.plan.group_id, 0, Outcome.OK)
    world.decide()
    world.decide()
    cycle = [group.plan.tasks[0].env_name for group in world.open.values()][:4]
    assert Counter(cycle) == shares


def test_nothing_is_evaluated_while_a_server_serves_an_older_version() -> None:
    world = made_run(0, 2)
    world.resume(0)
    world.publish()
    world.served_version = 0
    world.beat()
    world.decide()
    assert not world.open
    world.served_version = 1
    world.now_s += 0.1
    world.beat()
    world.decide()
    assert len(world.open) == 4


def test_groups_wait_for_agents_outside_also_over_a_restart_and_their_time_begins_then() -> None:
    world = made_run(0, 2)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    waiting = tuple(world.open)

    def wait(num_s: int) -> None:
        for _ in range(num_s):
            world.now_s += 1.0
            world.beat()
            world.core.on_activity(AgentActivity("w", 0, 0, 0, 0, 0.0, waiting), world.now_s)
            world.decide()

    wait(100)
    assert tuple(world.open) == waiting
    assert "4 groups wait for agents outside" in world.core.status(world.now_s).hints[-1]
    world.restart()
    world.decide()
    wait(100)
    assert tuple(world.open) == waiting
    assert not world.closed
    world.now_s += 29.9
    world.decide()
    assert not world.closed
    world.now_s += 0.2
    world.decide()
    assert world.closed == set(waiting)


def test_an_emptied_redis_continues_the_data_order_of_the_checkpoint_under_new_names() -> None:
    world = made_run(0, 2)
    world.resume(0)
    for _ in range(12):
        world.served_version = world.policy_version
        world.beat()
        world.decide()
        world.play_all()
        world.make_step()
    before = {e.body.group_id for e in world.events if isinstance(e.body, GroupAdmitted)}
    fresh = made_run(0, 2)
    fresh.core.replay(world.events, world.now_s)
    assert fresh.core.adopt([], 0, [], 2000.0) == []
    fresh.events = list(world.events)
    assert fresh.core.decide(2000.0) == []
    fresh.policy_version, fresh.now_s = world.policy_version, 2000.0
    fresh.lineage = 7
    fresh.publish()
    fresh.step = 2
    fresh.happen(WeightsPublished(fresh.policy_version + 1, "L8", 2, 1))
    fresh.happen(LearnerResumed("L8", 2, 6, "step_2"))
    fresh.served_version = fresh.policy_version + 1
    fresh.beat()
    fresh.decide()
    names = {name for name, group in fresh.open.items() if group.plan.phase == "train"}
    assert names
    assert not names & before
    assert (
        min(group.plan.group_index for group in fresh.open.values() if group.plan.phase == "train") == 6
    )
