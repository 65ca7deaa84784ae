"""The learner's one actor: groups in, steps, versions out, checkpoints.

Order of a step: groups are taken and computed as they come; the weights change; the next step begins
while this one's weights are published; `StepFinished` follows the publication. A checkpoint waits for
the publication of its step, is written while nothing computes, and then releases its groups in the buffer.
Whatever fails here ends the process: the next one goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tailrace.clock import Clock
from tailrace.config import RunConfig
from tailrace.log import get_logger
from tailrace.runtime import StopService
from tailrace.weights.tensors import TensorBytes
from tailrace_learner import metrics
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.rows import PreparedGroup, RowBuilder
from tailrace_learner.core.run_state import RunState
from tailrace_learner.core.step import Metrics, StepTrainer
from tailrace_learner.ports import (
    CheckpointStore,
    Computer,
    EventSink,
    GroupSource,
    MetricsWriter,
    Taken,
    TrajectoryLog,
    VersionBook,
    WeightSink,
)
from tailrace_protos.event import CheckpointSaved, StepFinished
from tailrace_protos.trajectory import TrajectoryGroup

log = get_logger(__name__)

SERVICE = "learner"
_BLOCK_S = 1.0  # longest wait for groups at once
_SAVE_AGAIN_S = 10.0  # between attempts to save the last checkpoint
_EXIT_FAILED = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Everything outside of the learner's arithmetic."""

    source: GroupSource
    events: EventSink
    versions: VersionBook
    weights: WeightSink
    checkpoints: CheckpointStore[RunState]
    compute: Computer
    clock: Clock
    read_weights: Callable[[], list[TensorBytes]]
    writers: Sequence[MetricsWriter] = ()
    trajectories: TrajectoryLog | None = None


@dataclass(slots=True)
class _Timing:
    """Where one step's wall time went."""

    began_s: float  # end of the step before
    wait_s: float = 0.0
    busy_s: float = 0.0
    first_pass_unix_s: float = 0.0  # 0 before the first backward


@dataclass(slots=True)
class _Held:
    """Groups taken since the last checkpoint."""

    entry_ids: list[str] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    num_bytes: int = 0


class Learner:
    """Trains from `state` to `run.max_steps`. `run_forever` is the body of the service's loop."""

    def __init__(
        self, world: World, trainer: StepTrainer, run: RunConfig, config: LearnerConfig, state: RunState
    ) -> None:
        self._world = world
        self._trainer = trainer
        self._run = run
        self._config = config
        self._state = state
        self._builder = RowBuilder(config, run.max_staleness, state.ancestry)
        self._book: dict[int, tuple[str, int]] = {}
        self._held = _Held()
        self._publishing: asyncio.Task[None] | None = None
        self._entered = False
        self._is_save_overdue = False
        self._step_ended_s = world.clock.monotonic_s()

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._state

    async def run_forever(self) -> None:
        """All steps, once. Entered again after a failure, it ends the process: memory is not to be trusted."""
        if self._entered:
            raise StopService(
                _EXIT_FAILED, "the learner failed inside a step; it resumes from its checkpoint"
            )
        self._entered = True
        async with asyncio.TaskGroup() as tasks:
            while self._state.step < self._run.max_steps:
                await self._step(tasks)
                await self._save_if_due()
            await self._published()

    async def save_first(self) -> None:
        """Checkpoint before the first step, so that a restart need not prepare the model again."""
        await self._save()

    # One step

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        timing = _Timing(self._step_ended_s)
        trainer, state = self._trainer, self._state
        await self._world.compute(trainer.begin, state.step)
        groups: list[TrajectoryGroup] = []
        num_dropped = 0
        while trainer.num_missing_groups:
            taken = await self._waited(
                timing, self._world.source.next_groups(trainer.num_missing_groups, _BLOCK_S)
            )
            kept = await self._add(taken)
            groups += kept
            num_dropped += len(taken) - len(kept)
            if taken:
                await self._compute(timing, trainer.work)
        numbers = await self._compute(timing, trainer.finish)
        weights = await self._world.compute(self._world.read_weights)
        self._advance(timing, numbers)
        self._keep_trajectories(groups)
        await self._published()
        finished = self._finished(timing, groups, num_dropped, numbers)
        self._publishing = tasks.create_task(self._publish(weights, finished), name="publish")

    async def _add(self, taken: Sequence[Taken]) -> list[TrajectoryGroup]:
        """Take groups into the step; those that must be given back are. Returns those kept."""
        kept: list[TrajectoryGroup] = []
        for entry in taken:
            if self._builder.unknown_versions(entry.group, self._book):
                self._book = await self._world.versions.all()
            prepared = self._builder.prepare(entry.group, self._state.step, self._book)
            _count(prepared)
            self._see_index(entry.group.group_index)
            if prepared.drop_reason:
                await self._world.source.mark_dropped([entry.entry_id], prepared.drop_reason)
                continue
            self._trainer.add(prepared)
            self._held.entry_ids.append(entry.entry_id)
            self._held.group_ids.append(entry.group.group_id)
            self._held.num_bytes += entry.num_bytes
            kept.append(entry.group)
        metrics.RETAINED_BYTES.set(self._held.num_bytes)
        return kept

    def _see_index(self, group_index: int) -> None:
        """The data order goes on beyond every group that was taken."""
        if group_index >= self._state.next_group_index:
            self._state = msgspec.structs.replace(self._state, next_group_index=group_index + 1)

    def _advance(self, timing: _Timing, numbers: Metrics) -> None:
        """Close the books of a step."""
        now_s = self._world.clock.monotonic_s()
        wall_s = max(now_s - timing.began_s, 1e-9)
        self._step_ended_s = now_s
        numbers["learner_wait_s"] = timing.wait_s
        numbers["learner_busy_s"] = timing.busy_s
        numbers["tokens_per_s"] = (numbers["num_row_tokens"] or 0.0) / wall_s
        self._state = msgspec.structs.replace(
            self._state,
            step=self._state.step + 1,
            num_trained_groups=self._state.num_trained_groups + self._run.groups_per_step,
        )
        metrics.STEP.set(self._state.step)
        metrics.BUSY_SECONDS.observe(timing.busy_s)
        metrics.WAIT_SECONDS.observe(timing.wait_s)
        metrics.TRAINED_TOKENS.inc(numbers["num_trained_tokens"] or 0.0)
        metrics.SKIPPED_UPDATES.inc(numbers["num_skipped_updates"] or 0.0)

    def _finished(
        self, timing: _Timing, groups: Sequence[TrajectoryGroup], num_dropped: int, numbers: Metrics
    ) -> StepFinished:
        """The step's event, still without its policy version."""
        now = self._world.clock.unix_s()
        return StepFinished(
            lineage=self._state.lineage,
            step=self._state.step,
            policy_version=-1,
            group_ids=tuple(group.group_id for group in groups),
            num_dropped_groups=num_dropped,
            started_unix_s=timing.first_pass_unix_s or now,
            finished_unix_s=now,
            metrics=numbers,
        )

    def _keep_trajectories(self, groups: Sequence[TrajectoryGroup]) -> None:
        if self._world.trajectories is None:
            return
        try:
            self._world.trajectories.append(self._state.step, self._state.lineage, groups)
        except OSError as error:
            metrics.FAILED_TRAJECTORY_FILES.inc()
            log.error(
                "trajectories not kept: free space on the disk of output_dir",
                step=self._state.step,
                error=str(error),
            )

    # Versions

    async def publish_start(self) -> None:
        """Publish the weights as they are before the first step."""
        weights = await self._world.compute(self._world.read_weights)
        self._state = msgspec.structs.replace(
            self._state, policy_version=await self._offer(weights, self._state.step)
        )

    async def _publish(self, weights: Sequence[TensorBytes], finished: StepFinished) -> None:
        version = await self._offer(weights, finished.step)
        finished = msgspec.structs.replace(finished, policy_version=version)
        await self._world.events.emit(SERVICE, finished)
        self._state = msgspec.structs.replace(self._state, policy_version=version)
        for writer in self._world.writers:
            writer.write(finished.step, finished.metrics)
        if finished.step % max(self._run.logging_steps, 1) == 0 or finished.step == self._run.max_steps:
            shown = (
                "reward_mean",
                "success_rate",
                "loss",
                "grad_norm",
                "staleness_mean",
                "tokens_per_s",
            )
            log.info(
                "step finished",
                step=finished.step,
                policy_version=version,
                **{key: finished.metrics.get(key) for key in shown},
            )

    async def _offer(self, weights: Sequence[TensorBytes], step: int) -> int:
        began_s = self._world.clock.monotonic_s()
        version = await self._world.weights.publish(
            weights, lineage=self._state.lineage, optimizer_step=step
        )
        metrics.PUBLISH_SECONDS.observe(self._world.clock.monotonic_s() - began_s)
        return version

    async def _published(self) -> None:
        """Wait until the last step's weights are published; raises what went wrong with them."""
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            await publishing

    # Checkpoints

    async def _save_if_due(self) -> None:
        step = self._state.step
        is_last = step == self._run.max_steps
        is_regular = self._run.save_steps > 0 and step % self._run.save_steps == 0
        is_full = self._held.num_bytes >= self._config.max_retained_bytes
        if not (is_last or is_regular or is_full or self._is_save_overdue):
            return
        await self._published()
        while not await self._save() and is_last:
            await self._world.clock.sleep(_SAVE_AGAIN_S)

    async def _save(self) -> bool:
        """Write a checkpoint and release its groups; False when the disk did not take it."""
        state = msgspec.structs.replace(
            self._state,
            entry_ids=tuple(self._held.entry_ids),
            group_ids=tuple(self._held.group_ids),
            saved_unix_s=self._world.clock.unix_s(),
        )
        began_s = self._world.clock.monotonic_s()
        try:
            path = await self._world.compute(self._world.checkpoints.save, state)
        except OSError as error:
            self._is_save_overdue = True
            metrics.FAILED_CHECKPOINTS.inc()
            log.error("checkpoint not saved", step=state.step, error=str(error))
            return False
        self._is_save_overdue = False
        metrics.CHECKPOINT_SECONDS.observe(self._world.clock.monotonic_s() - began_s)
        await self._world.source.commit_checkpoint(state.entry_ids, saved_event(state, str(path)))
        self._held = _Held()
        metrics.RETAINED_BYTES.set(0)
        lineages = {state.lineage, *(ancestor.lineage for ancestor in state.ancestors)}
        await self._world.compute(
            self._world.checkpoints.prune, self._config.save_total_limit, lineages
        )
        log.info("checkpoint saved", step=state.step, path=str(path), num_groups=len(state.group_ids))
        return True

    # Time

    async def _waited(self, timing: _Timing, waiting: Awaitable[T]) -> T:
        began_s = self._world.clock.monotonic_s()
        result = await waiting
        timing.wait_s += self._world.clock.monotonic_s() - began_s
        return result

    async def _compute(self, timing: _Timing, work: Callable[[], T]) -> T:
        began_s, began_unix_s = self._world.clock.monotonic_s(), self._world.clock.unix_s()
        result = await self._world.compute(work)
        timing.busy_s += self._world.clock.monotonic_s() - began_s
        if result and not timing.first_pass_unix_s:
            timing.first_pass_unix_s = began_unix_s
        return result


def saved_event(state: RunState, path: str) -> CheckpointSaved:
    """The event of a checkpoint; the same for the learner that wrote it and the one that resumes from it."""
    return CheckpointSaved(
        lineage=state.lineage, step=state.step, path=path, num_groups=len(state.group_ids)
    )


def _count(prepared: PreparedGroup) -> None:
    fate = prepared.drop_reason or ("trained" if prepared.rows else "without_rows")
    metrics.GROUPS.labels(fate).inc()
    for reason in ("stale", "nonfinite"):
        metrics.MASKED_TOKENS.labels(reason).inc(prepared.counts.get(f"num_{reason}_tokens", 0))
