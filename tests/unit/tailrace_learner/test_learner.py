"""The learner's loop between hand-written fakes: drops, publication, checkpoints, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tailrace.clock import SystemClock
from tailrace.config import RunConfig
from tailrace.runtime import StopService
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters.trajectory_files import TrajectoryFiles, read_groups
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.progress import Progress
from tailrace_learner.core.step.run_state import RunState, resumed_state
from tailrace_learner.core.step.step import StepTrainer
from tailrace_learner.handlers import Learner, LearnerPorts
from tailrace_learner.ports import OWN_DEVICE
from tailrace_protos.event import CheckpointSaved, StepFinished, TrainingEnded
from tailrace_protos.trajectory import TrajectoryGroup
from tests.unit.tailrace_learner.factory import config, group, make_policy, trajectory


class Ready(NamedTuple):
    entry_id: str
    num_bytes: int
    group: TrajectoryGroup


def ready(index: int, rewards: Sequence[float] = (1.0, 0.0), version: int = 1) -> Ready:
    members = [
        trajectory(member, reward, versions=(version,) * 3, group_id=f"g{index}")
        for member, reward in enumerate(rewards)
    ]
    return Ready(f"{index}-0", 100, group(members, index))


@dataclass
class FakeSource:
    """A buffer in memory; waits for ever when it is empty."""

    entries: list[Ready]
    dropped: list[tuple[str, str]] = field(default_factory=list)
    committed: list[tuple[tuple[str, ...], CheckpointSaved]] = field(default_factory=list)
    old_steps: list[int] = field(default_factory=list)
    ended_lineage: str = ""
    is_nearly_full: bool = False

    async def next_groups(self, max_groups: int, block_s: float, old_step: int) -> list[Ready]:
        self.old_steps.append(old_step)
        if not self.entries:
            await asyncio.sleep(0.01)
        taken, self.entries = self.entries[:max_groups], self.entries[max_groups:]
        return taken

    async def is_training_ended(self, lineage: str) -> bool:
        return self.ended_lineage == lineage

    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None:
        self.dropped += [(entry_id, reason) for entry_id in entry_ids]

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        self.committed.append((tuple(entry_ids), event))


@dataclass
class FakeWorld:
    """Everything else: records what it was told."""

    events: list[Any] = field(default_factory=list)
    published: list[tuple[str, int]] = field(default_factory=list)
    saved: list[RunState] = field(default_factory=list)
    book: dict[int, tuple[str, int]] = field(default_factory=lambda: {1: ("0-a", 0)})
    asked: list[set[int]] = field(default_factory=list)  # versions
    full_disk_times: int = 0
    publish_error: Exception | None = None
    pruned: list[tuple[int, set[str]]] = field(default_factory=list)

    async def emit(self, service: str, *bodies: Any, once: str = "") -> None:
        self.events += bodies

    async def of(self, policy_versions: Iterable[int]) -> dict[int, tuple[str, int]]:
        asked = set(policy_versions)
        self.asked.append(asked)
        return {version: self.book[version] for version in asked & self.book.keys()}

    async def publish(
        self,
        tensors: Sequence[TensorBytes],
        *,
        lineage: str,
        optimizer_step: int,
        base_version: int | None = None,
    ) -> int:
        if self.publish_error is not None:
            raise self.publish_error
        self.published.append((lineage, optimizer_step))
        version = len(self.published) + 1
        self.book[version] = (lineage, optimizer_step)
        return version

    def take(self) -> int:
        return len(self.published)

    def write(self, copy: int, state: RunState) -> Path:
        assert copy == len(self.published) or state.step < len(self.published)
        if self.full_disk_times:
            self.full_disk_times -= 1
            raise OSError("no space left")
        self.saved.append(state)
        return Path(f"step_{state.step}")

    def prune(self, keep: int, lineages: Container[str]) -> None:
        assert isinstance(lineages, set)
        self.pruned.append((keep, lineages))


async def compute(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return work(*args, **kwargs)


def no_weights(is_whole: bool) -> list[TensorBytes]:
    return []


class InstantClock(SystemClock):
    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)


def learner(
    source: FakeSource, world: FakeWorld, *, state: RunState | None = None, **settings: Any
) -> Learner:
    run_keys = {
        "max_steps": 2,
        "save_steps": 0,
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 5,
        "logging_steps": 1,
        "stale_groups": "mask",
    }
    run_keys |= {key: settings.pop(key) for key in list(settings) if key in run_keys}
    run = RunConfig(exp_name="unit", **run_keys)
    trajectories = settings.pop("trajectories", None)
    device = settings.pop("device", OWN_DEVICE)
    read_weights = settings.pop("read_weights", no_weights)
    given = config(**settings)
    policy = make_policy()
    trainer = StepTrainer(
        policy,
        SummedOptimizer.of(policy.parameters, given.training_args),
        given,
        groups_per_step=run.groups_per_step,
        max_steps=run.max_steps,
    )
    whole = LearnerPorts(
        source,
        world,
        world,
        world,
        world,
        compute,
        InstantClock(),
        read_weights,
        world.take,
        trajectories=trajectories,
        device=device,
    )
    return Learner(whole, trainer, run, given, state or RunState(step=0, lineage="0-a"))


def steps(world: FakeWorld) -> list[StepFinished]:
    return [event for event in world.events if isinstance(event, StepFinished)]


@pytest.mark.parametrize(
    ("policy", "old_steps"),
    [("mask", {-1}), ("drop", {-1}), ("wait", {-1, 0}), ("close", {-1, 0}), ("auto", {-1, 0})],
)
async def test_a_step_keeps_places_for_groups_that_it_is_the_last_to_train(
    policy: str, old_steps: set[int]
) -> None:
    source = FakeSource([ready(index) for index in range(4)])
    await learner(source, FakeWorld(), stale_groups=policy, max_staleness=1).run_forever()
    assert set(source.old_steps) == old_steps


async def test_every_group_makes_one_step_and_every_step_one_version() -> None:
    source, world = FakeSource([ready(index) for index in range(4)]), FakeWorld()
    one = learner(source, world)
    await asyncio.wait_for(one.run_forever(), 30)
    assert [event.group_ids for event in steps(world)] == [("g0", "g1"), ("g2", "g3")]
    assert [event.policy_version for event in steps(world)] == [2, 3]
    assert world.published == [("0-a", 1), ("0-a", 2)]
    assert one.state.next_group_index == 4
    assert one.state.num_trained_groups == 4


async def test_only_versions_of_a_groups_tokens_are_read_and_each_once() -> None:
    """A run of weeks has 100,000 versions: no step may read them all."""
    source = FakeSource([ready(index, version=1 + index // 2) for index in range(8)])
    world = FakeWorld(book={version: ("0-a", version - 1) for version in range(1, 5)})
    await asyncio.wait_for(learner(source, world, max_steps=4).run_forever(), 30)
    assert world.asked == [{1}, {2}, {3}, {4}]
    assert [event.metrics["num_groups"] for event in steps(world)] == [2, 2, 2, 2]


async def test_groups_that_the_buffer_gives_again_are_trained_once() -> None:
    """A Redis that lost its last writes does not know any more that they were taken."""
    source, world = FakeSource([ready(index) for index in (0, 1, 0, 2, 2, 1, 3)]), FakeWorld()
    await asyncio.wait_for(learner(source, world).run_forever(), 30)
    assert [event.group_ids for event in steps(world)] == [("g0", "g1"), ("g2", "g3")]
    assert source.dropped == []
    assert source.committed[-1][0] == ("0-0", "1-0", "2-0", "3-0")


async def test_groups_of_a_checkpoint_whose_release_redis_lost_are_trained_once() -> None:
    """They are given again, and released with the next checkpoint; the next learner names them too."""
    source, world = FakeSource([ready(index) for index in (0, 1, 2, 0, 1, 3)]), FakeWorld()
    await asyncio.wait_for(learner(source, world, save_steps=1).run_forever(), 30)
    assert [event.group_ids for event in steps(world)] == [("g0", "g1"), ("g2", "g3")]
    assert [state.entry_ids for state in world.saved] == [("0-0", "1-0"), ("2-0", "3-0")]
    assert [entry_ids for entry_ids, _ in source.committed] == [
        ("0-0", "1-0"), ("0-0", "1-0", "2-0", "3-0"),
    ]  # fmt: skip
    source.entries = [ready(index) for index in (0, 3, 4, 5)]
    resumed = learner(source, world, state=resumed_state(world.saved[-1], {}), max_steps=3)
    await asyncio.wait_for(resumed.run_forever(), 30)
    assert steps(world)[-1].group_ids == ("g4", "g5")


async def test_a_buffer_that_is_nearly_full_gets_a_checkpoint_after_each_step() -> None:
    source = FakeSource([ready(index) for index in range(6)], is_nearly_full=True)
    world = FakeWorld()
    await asyncio.wait_for(learner(source, world, max_steps=3).run_forever(), 30)
    assert [state.step for state in world.saved] == [1, 2, 3]
    assert source.committed[0][0] == ("0-0", "1-0")


def test_a_checkpoint_names_older_groups_up_to_a_bound() -> None:
    progress = Progress(RunState(step=0, lineage="0-a"), RunConfig(exp_name="unit"), 1 << 30)
    for begin in range(0, 12_000, 3_000):
        progress.begin_step()
        for index in range(begin, begin + 3_000):
            progress.hold(f"{index}-0", f"g{index}", 1)
        state = progress.saving(0.0)
        progress.saved()
    assert state.entry_ids[0] == "9000-0"
    assert len(state.older_entry_ids) == 4096
    assert state.released_ids[-3_001:-2_999] == ("8999-0", "9000-0")
    assert progress.holds("8999-0")
    assert not progress.holds("1-0")


class SlowWorld(FakeWorld):
    """A publication takes longer than the computation of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = 0  # publications that hold exported weights
        self.held: list[int] = []  # the same, at each export

    def read_weights(self, is_whole: bool) -> list[TensorBytes]:
        self.held.append(self.num_open)
        return []

    async def publish(self, tensors: Sequence[TensorBytes], **given: Any) -> int:
        self.num_open += 1
        await asyncio.sleep(0.2)
        self.num_open -= 1
        return await super().publish(tensors, **given)


async def test_weights_are_exported_when_those_of_the_last_step_are_not_held_any_more() -> None:
    """Shared memory has room for one export."""
    source, world = FakeSource([ready(index) for index in range(6)]), SlowWorld()
    one = learner(source, world, max_steps=3, read_weights=world.read_weights)
    await asyncio.wait_for(one.run_forever(), 30)
    assert world.held == [0, 0, 0]


async def test_the_metrics_of_a_step_have_every_key() -> None:
    world = FakeWorld()
    await learner(FakeSource([ready(index) for index in range(4)]), world).run_forever()
    keys = [
        "reward_mean",
        "reward_std",
        "success_rate",
        "loss",
        "grad_norm",
        "entropy",
        "kl",
        "mismatch_kl",
        "mismatch_correlation",
        "behaviour_kl",
        "staleness_mean",
        "staleness_max",
        "num_groups",
        "num_trained_tokens",
        "tokens_per_s",
        "learner_wait_s",
        "learner_busy_s",
        "clip_fraction",
        "tis_truncated_fraction",
        "num_stale_tokens",
        "num_nonfinite_tokens",
    ]
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")
    for event in steps(world):
        assert set(keys) <= set(event.metrics)
        unnamed = {key for key in event.metrics if f"`{key}`" not in page}
        assert {key.partition("/")[0] for key in unnamed} <= {"tag", "drift", "drift_tokens"}
        assert event.started_unix_s <= event.finished_unix_s
    assert [event.metrics["staleness_max"] for event in steps(world)] == [0.0, 1.0]
    assert steps(world)[1].metrics["mismatch_kl"] is None


@pytest.mark.parametrize(("logging_steps", "told"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3])])
async def test_every_so_many_steps_are_told_in_the_log(logging_steps: int, told: list[int]) -> None:
    source = FakeSource([ready(index) for index in range(5)])
    one = learner(source, FakeWorld(), max_steps=5, groups_per_step=1, logging_steps=logging_steps)
    with capture_logs() as lines:
        await one.run_forever()
    assert [line["step"] for line in lines if line["event"] == "step finished"] == told


async def test_turns_that_gigpo_can_compare_with_none_are_told_every_step() -> None:
    source, world = FakeSource([ready(index) for index in range(4)]), FakeWorld()
    one = learner(source, world, adv_estimator="gigpo")
    with capture_logs() as lines:
        await one.run_forever()
    told = [line for line in lines if line["event"] == "turns without observation"]
    assert [(line["log_level"], line["step"], line["num_turns"]) for line in told] == [
        ("warning", event.step, event.metrics["num_unnamed_turns"]) for event in steps(world)
    ]
    assert told
    assert "granularity: step" in told[0]["remedy"]


async def test_an_episode_of_bytes_that_are_no_numbers_is_left_out_and_told() -> None:
    first, *others = [ready(index, rewards=(1.0, 0.0, 0.5)) for index in range(4)]
    bad = first.group.members[0]
    rows = (replace(bad.rows[0], inference_logprobs=b"odd"),)
    members = (replace(bad, rows=rows), *first.group.members[1:])
    spoilt = first._replace(group=group(members, 0))
    source, world = FakeSource([spoilt, *others]), FakeWorld()
    with capture_logs() as lines:
        await learner(source, world).run_forever()
    assert [event.metrics["num_malformed_episodes"] for event in steps(world)] == [1.0, 0.0]
    assert steps(world)[0].metrics["num_groups_train"] == 2.0
    told = [line for line in lines if line["event"] == "malformed episodes"]
    assert [(line["log_level"], line["group_id"], line["flaws"]) for line in told] == [
        ("error", "g0", {"bytes": 1})
    ]


async def test_dropped_groups_are_given_back_and_replaced() -> None:
    entries = [ready(0), ready(1, rewards=(1.0, 1.0)), ready(2), ready(3), ready(4)]
    source, world = FakeSource(entries), FakeWorld()
    await learner(source, world, zero_variance_groups="redraw").run_forever()
    assert source.dropped == [("1-0", "zero_variance")]
    assert [event.group_ids for event in steps(world)] == [("g0", "g2"), ("g3", "g4")]
    assert [event.num_dropped_groups for event in steps(world)] == [1, 0]
    assert source.committed[-1][0] == ("0-0", "2-0", "3-0", "4-0")


async def test_a_checkpoint_names_exactly_the_groups_since_the_one_before() -> None:
    source, world = FakeSource([ready(index) for index in range(6)]), FakeWorld()
    await learner(source, world, max_steps=3, save_steps=2, save_total_limit=4).run_forever()
    assert [state.step for state in world.saved] == [2, 3]
    assert [state.entry_ids for state in world.saved] == [("0-0", "1-0", "2-0", "3-0"), ("4-0", "5-0")]
    assert [entry_ids for entry_ids, _ in source.committed] == [
        state.released_ids for state in world.saved
    ]
    assert source.committed[0][1] == CheckpointSaved("0-a", 2, "step_2", 4)
    assert world.saved[0].policy_version == 3
    assert world.pruned[-1] == (4, {"0-a"})


async def test_a_stop_saves_the_steps_that_are_done_and_leaves_the_groups_of_the_next_one() -> None:
    source, world = FakeSource([ready(index) for index in range(3)]), FakeWorld()
    one = learner(source, world, max_steps=9)
    running = asyncio.create_task(one.run_forever())
    async with asyncio.timeout(120):
        while source.entries or len(source.old_steps) < 4:
            await asyncio.sleep(0)
        await one.stop()
        await running
    assert [(state.step, state.entry_ids) for state in world.saved] == [(1, ("0-0", "1-0"))]
    assert world.saved[0].next_group_index == 2
    assert [event.step for event in steps(world)] == [1]


class GoneSource(FakeSource):
    """A buffer whose Redis goes once it is empty: calls wait until it is back, which it never is."""

    gone: asyncio.Event

    async def next_groups(self, max_groups: int, block_s: float, old_step: int) -> list[Ready]:
        if self.entries:
            return await super().next_groups(max_groups, block_s, old_step)
        self.gone.set()
        return await asyncio.get_running_loop().create_future()

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        await asyncio.get_running_loop().create_future()


async def test_a_stop_saves_the_steps_that_are_done_though_redis_is_gone() -> None:
    source, world = GoneSource([ready(0), ready(1)]), FakeWorld()
    source.gone = asyncio.Event()
    one = learner(source, world, max_steps=9)
    running = asyncio.create_task(one.run_forever())
    async with asyncio.timeout(120):
        await source.gone.wait()
        stopping = asyncio.create_task(one.stop())
        while not world.saved:
            await asyncio.sleep(0)
    assert [state.step for state in world.saved] == [1]
    running.cancel()
    await asyncio.wait({running, stopping})


class StuckWorld(FakeWorld):
    """weight_sync and NATS are gone: no publication ends. `is_redis_gone`: no event is taken."""

    def __init__(self, *, is_redis_gone: bool = False) -> None:
        super().__init__()
        self.is_redis_gone = is_redis_gone
        self.num_offers = 0

    async def publish(self, tensors: Sequence[TensorBytes], **_: Any) -> int:
        self.num_offers += 1
        return await asyncio.get_running_loop().create_future()

    async def emit(self, service: str, *bodies: Any, once: str = "") -> None:
        if self.is_redis_gone:
            await asyncio.get_running_loop().create_future()
        await super().emit(service, *bodies, once=once)

    def write(self, copy: int, state: RunState) -> Path:
        self.saved.append(state)
        return Path(f"step_{state.step}")


async def stopped_while_stuck(world: StuckWorld, num_groups: int) -> None:
    """A learner that is stopped once its publication is on the way and its buffer is empty."""
    source = FakeSource([ready(index) for index in range(num_groups)])
    one = learner(source, world, max_steps=9, drain_s=1.0)
    running = asyncio.create_task(one.run_forever())
    async with asyncio.timeout(120):
        while not world.num_offers or source.entries:
            await asyncio.sleep(0)
        await one.stop()
        await running


@pytest.mark.parametrize(("num_groups", "done"), [(2, [1]), (3, [1]), (4, [1, 2])])
async def test_a_stop_saves_the_steps_that_are_done_though_no_publication_ends(
    num_groups: int, done: list[int]
) -> None:
    world = StuckWorld()
    await stopped_while_stuck(world, num_groups)
    assert [state.step for state in world.saved] == done[-1:]
    assert [(event.step, event.policy_version) for event in steps(world)] == [
        (step, -1) for step in done
    ]
    assert world.saved[0].untold_steps == ()


async def test_steps_that_could_not_be_told_are_in_the_last_checkpoint() -> None:
    world = StuckWorld(is_redis_gone=True)
    await stopped_while_stuck(world, 4)
    (state,) = world.saved
    assert (state.step, state.group_ids) == (2, ("g0", "g1", "g2", "g3"))
    assert [event.group_ids for event in state.untold_steps] == [("g0", "g1"), ("g2", "g3")]


async def test_a_checkpoint_of_a_run_that_goes_on_has_no_untold_steps() -> None:
    world = FakeWorld()
    await learner(FakeSource([ready(index) for index in range(4)]), world, save_steps=1).run_forever()
    assert [state.untold_steps for state in world.saved] == [(), ()]


async def test_a_stop_without_new_steps_saves_nothing() -> None:
    world = FakeWorld()
    one = learner(FakeSource([ready(0)]), world)
    await one.stop()
    await one.run_forever()
    assert world.saved == []


async def test_retained_bytes_bring_a_checkpoint_forward() -> None:
    source, world = FakeSource([ready(index) for index in range(6)]), FakeWorld()
    await learner(source, world, max_steps=3, max_retained_bytes=200).run_forever()
    assert [state.step for state in world.saved] == [1, 2, 3]


async def test_a_full_disk_is_tried_again_after_the_next_step_and_at_the_end_until_it_works() -> None:
    source, world = FakeSource([ready(index) for index in range(6)]), FakeWorld(full_disk_times=1)
    await learner(source, world, max_steps=3, save_steps=1).run_forever()
    assert [state.step for state in world.saved] == [2, 3]
    assert world.saved[0].entry_ids == ("0-0", "1-0", "2-0", "3-0")
    world = FakeWorld(full_disk_times=3)
    await learner(FakeSource([ready(0), ready(1)]), world, max_steps=1).run_forever()
    assert [state.step for state in world.saved] == [1]


async def test_checkpoints_stay_in_order_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resume takes the latest, and pruning removes the earliest ones."""
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr(InstantClock, "unix_s", lambda clock: float(next(times)))
    world, state = FakeWorld(), RunState(step=0, lineage="0-a", saved_unix_s=2000.0)
    source = FakeSource([ready(index) for index in range(6)])
    await learner(source, world, state=state, save_steps=1, max_steps=3).run_forever()
    saved = [each.saved_unix_s for each in world.saved]
    assert 2000.0 < saved[0] < saved[1] < saved[2] < 2000.1
    assert [each.step for each in world.saved] == [1, 2, 3]


async def test_a_failed_publication_ends_the_loop_and_then_the_process() -> None:
    world = FakeWorld(publish_error=ConnectionError("weight_sync is gone"))
    one = learner(FakeSource([ready(0), ready(1)]), world)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(one.run_forever(), 30)
    assert failure.group_contains(ConnectionError)
    assert steps(world) == []
    with pytest.raises(StopService):
        await one.run_forever()


async def test_a_resumed_learner_goes_on_counting() -> None:
    state = RunState(step=7, lineage="7-b", next_group_index=40, num_trained_groups=14)
    world = FakeWorld(book={1: ("7-b", 7)})
    one = learner(FakeSource([ready(33), ready(41)]), world, max_steps=8, state=state)
    await one.run_forever()
    assert [(event.lineage, event.step) for event in steps(world)] == [("7-b", 8)]
    assert one.state.next_group_index == 42
    assert one.state.num_trained_groups == 16


async def test_a_run_that_has_all_its_steps_does_nothing() -> None:
    world = FakeWorld()
    await learner(FakeSource([]), world, max_steps=0).run_forever()
    assert world.events == world.saved == []


async def test_trajectories_are_kept_as_they_were_trained(tmp_path: Path) -> None:
    entries = [ready(index) for index in range(4)]
    await learner(
        FakeSource(list(entries)), FakeWorld(), trajectories=TrajectoryFiles(tmp_path)
    ).run_forever()
    files = sorted((tmp_path / "trajectories").iterdir())
    assert [file.name for file in files] == ["step_000001-0-a.msgpack", "step_000002-0-a.msgpack"]
    kept = [kept.group_id for file in files for kept in read_groups(file)]
    assert kept == ["g0", "g1", "g2", "g3"]
    assert bytes(read_groups(files[0])[0].members[0].rows[0].token_ids) == bytes(
        entries[0].group.members[0].rows[0].token_ids
    )


def test_trajectories_without_token_spans_are_refused_with_their_file(tmp_path: Path) -> None:
    given = ready(0).group
    bare = replace(given.members[0], rows=(replace(given.members[0].rows[0], spans=()),))
    path = TrajectoryFiles(tmp_path).append(1, "0-a", [group((bare, *given.members[1:]))])
    with pytest.raises(ValueError, match=r"step_000001-0-a.msgpack: rows without token spans"):
        read_groups(path)


async def test_training_that_the_scheduler_ends_saves_and_leaves_the_step_it_began() -> None:
    source, world = FakeSource([ready(index) for index in range(3)]), FakeWorld()
    one = learner(source, world, max_steps=9)
    source.ended_lineage = one.state.lineage
    await asyncio.wait_for(one.run_forever(), 30)
    assert [state.step for state in world.saved] == [1]
    assert source.committed[0][0] == ("0-0", "1-0"), "the third group stays in the buffer"
    assert world.events[-1] == TrainingEnded(one.state.lineage, 1)


async def test_an_end_of_another_lineage_ends_nothing() -> None:
    source, world = FakeSource([ready(index) for index in range(3)]), FakeWorld()
    source.ended_lineage = "9-other"
    one = learner(source, world, max_steps=9)
    running = asyncio.create_task(one.run_forever())
    async with asyncio.timeout(120):
        while len(source.old_steps) < 6:
            await asyncio.sleep(0.01)
    assert not running.done()
    await one.stop()
    await running
    assert not [event for event in world.events if isinstance(event, TrainingEnded)]


class SharedDevice:
    """Turns of the learner, and the groups that were taken while it had the device."""

    is_shared = True

    def __init__(self, source: FakeSource) -> None:
        self.has_it = True  # since the model was prepared
        self.num_turns = 1
        self.waited_with_it = 0
        waiting = source.next_groups

        async def next_groups(*args: Any) -> Any:
            self.waited_with_it += self.has_it
            return await waiting(*args)

        source.next_groups = next_groups  # type: ignore[method-assign]

    async def take(self) -> None:
        self.num_turns += not self.has_it
        self.has_it = True

    async def give(self) -> None:
        self.has_it = False


async def test_on_a_shared_device_servers_compute_while_the_learner_waits_for_groups() -> None:
    source, world = FakeSource([ready(index) for index in range(4)]), FakeWorld()
    device = SharedDevice(source)
    one = learner(source, world, device=device, save_steps=1)
    await asyncio.wait_for(one.run_forever(), 30)
    assert len(steps(world)) == 2
    assert device.waited_with_it == 0
    assert device.num_turns == 3, "one turn for the start, and one for each step"
    assert not device.has_it, "the last evaluation needs the servers"
