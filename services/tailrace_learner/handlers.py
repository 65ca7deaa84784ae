"""The learner's one actor: groups in, steps, versions out, checkpoints.

Order of a step: take groups and compute them as they come; change the weights; begin the next step
while this one's weights are published; emit `StepFinished` after the publication. A checkpoint waits
for the publication of its step, is copied between two passes and written while training goes on; the
buffer releases its groups once it is durable. A stop, or an end of training before `max_steps`, leaves
an unfinished step and saves a checkpoint. A stop gives publication and `StepFinished` up if they take
long: events that were not told are in the checkpoint, and the next learner tells them. A failure ends
the process: the next one resumes from there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tailrace.clock import Clock
from tailrace.config import RunConfig
from tailrace.log import get_logger
from tailrace.runtime import StopService
from tailrace.tracing import carried, span
from tailrace.weights.tensors import TensorBytes
from tailrace_learner import metrics
from tailrace_learner.adapters.observation import (
    DriftSeries,
    StepTrace,
    observe_group,
    observe_quarantine,
    observe_step,
)
from tailrace_learner.adapters.trajectory_files import TrajectoryFiles
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.group_returns import NO_LIMITS, RowLimits
from tailrace_learner.core.batch.lineage import newest_versions
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.step.progress import Progress, Timing, name_of, saved_event
from tailrace_learner.core.step.run_state import RunState
from tailrace_learner.ports import (
    OWN_DEVICE,
    CheckpointStore,
    Computer,
    Device,
    EventSink,
    GroupSource,
    GroupTrainer,
    TakenGroup,
    VersionReader,
    WeightSink,
)
from tailrace_protos.control import source_of
from tailrace_protos.event import ServerQuarantined, StepFinished, TrainingEnded
from tailrace_protos.trajectory import TrajectoryGroup

log = get_logger(__name__)

SERVICE = "learner"
_BLOCK_S = 1.0  # longest wait for groups at once
_SAVE_AGAIN_S = 10.0  # between attempts to save the last checkpoint
_PATIENCE = 0.1  # share of `drain_s` that a stop waits for a publication, and for the outbox
_EXIT_FAILED = 1
_LOGGED = ("reward_mean", "success_rate", "loss", "grad_norm", "staleness_mean", "tokens_per_s")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearnerPorts:
    """Connections of the learner to everything outside of its arithmetic."""

    source: GroupSource
    events: EventSink
    versions: VersionReader
    weights: WeightSink
    checkpoints: CheckpointStore[RunState]
    compute: Computer
    clock: Clock
    read_weights: Callable[[bool], list[TensorBytes]]  # of all, or of the trained ones
    take_snapshot: Callable[[], Any]  # copies weights and optimizer state to the host
    on_step_finished: Sequence[Callable[[int], None]] = ()  # called with the step; return at once
    trajectories: TrajectoryFiles | None = None
    device: Device = OWN_DEVICE


class Learner:
    """Trains from `state` to `run.max_steps`. `run_forever` is the body of the service's loop."""

    def __init__(
        self,
        ports: LearnerPorts,
        trainer: GroupTrainer[PreparedGroup],
        run: RunConfig,
        config: LearnerConfig,
        state: RunState,
        limits: RowLimits = NO_LIMITS,
    ) -> None:
        self._ports = ports
        self._trainer = trainer
        self._run = run
        self._config = config
        self._progress = Progress(state, run, config.max_retained_bytes)
        self._drift = DriftSeries()
        self._quarantine = dict(state.quarantine)  # source -> step of its last good reading
        self._builder = TrainingRowBuilder(
            config,
            run.max_staleness,
            state.ancestry,
            limits,
            self._quarantine,
            drops_stale=run.stale_groups == "drop",
        )
        self._versions: dict[int, tuple[str, int]] = {}
        self._publishing: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._base_version: int | None = None  # None: every version is whole
        self._entered = False
        self._stopping = asyncio.Event()
        self._is_solved = False  # the scheduler wants no further step
        self._ended = asyncio.Event()
        self._step_ended_s = ports.clock.monotonic_s()

    @property
    def state(self) -> RunState:
        """Current state of the run."""
        return self._progress.state

    async def run_forever(self) -> None:
        """Do all steps, once; a second call, after a failure, ends the process."""
        if self._entered:
            reason = "the learner failed inside a step; it resumes from its newest checkpoint"
            raise StopService(_EXIT_FAILED, reason)
        self._entered = True
        self._step_ended_s = self._ports.clock.monotonic_s()
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._progress.is_finished and await self._step(tasks):
                    await self._save_if_due(tasks)
                await self._published()
                await self._ports.device.give()
                await self._save_last()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """End the steps and save what they did; the groups of an unfinished step stay in the buffer."""
        self._stopping.set()
        if self._entered and not self._ended.is_set():
            log.info("stopping: saves a checkpoint", step=self.state.step)
            await self._ended.wait()

    async def save_first(self) -> None:
        """Checkpoint before the first step, so that a restart need not prepare the model again."""
        await self._save(*await self._copy())

    async def publish_start(self) -> None:
        """Publish the weights before the first step."""
        weights = await self._ports.compute(self._ports.read_weights, True)
        version = await self._offer(weights, self.state.step)
        if self._config.lora is not None:  # later versions carry adapters alone
            self._base_version = version
        self._progress.published(version)

    async def _step(self, tasks: asyncio.TaskGroup) -> bool:
        """Do one step; False if the learner was stopped, or training ended, before it was done."""
        timing = Timing(self._step_ended_s)
        ports, trainer = self._ports, self._trainer
        await self._waited(timing, ports.device.take())
        await ports.compute(trainer.begin, self.state.step)
        self._progress.begin_step()
        await ports.device.give()
        groups: list[TrajectoryGroup] = []
        trace = StepTrace()
        num_dropped = 0
        while trainer.num_missing_groups:
            if self._stopping.is_set() or self._is_solved:
                self._progress.abandon_step()
                return False
            taken = await self._waited(timing, self._take())
            kept = await self._add(taken)
            groups += kept
            trace.take(kept, ports.clock.unix_s())
            num_dropped += len(taken) - len(kept)
            if taken and not ports.device.is_shared:
                await self._work(timing)
        await self._waited(timing, ports.device.take())
        if ports.device.is_shared:
            await self._work(timing)
        numbers = await self._compute(timing, trainer.finish)
        self._drift.show(numbers)
        await self._published()  # before its buffer gets a second one beside it
        weights = await ports.compute(ports.read_weights, False)
        self._step_ended_s = ports.clock.monotonic_s()
        self._progress.step_done(timing, self._step_ended_s, numbers)
        observe_step(self.state.step, timing, numbers)
        self._keep_trajectories(groups)
        finished_unix_s = ports.clock.unix_s()
        finished = self._progress.finished_event(
            timing, finished_unix_s, [group.group_id for group in groups], num_dropped, numbers
        )
        with carried(trace.end(finished)):
            self._publishing = tasks.create_task(self._publish(weights, finished), name="publish")
        return True

    async def _take(self) -> Sequence[TakenGroup]:
        """Groups for the step; none if none came in time, and at a stop, also if Redis is gone."""
        taking = asyncio.ensure_future(self._take_or_end())
        await self._unless_stopped(taking)
        return () if taking.cancelled() else taking.result()

    async def _unless_stopped(self, work: asyncio.Future[Any], patience_s: float = 0.0) -> None:
        """Wait for `work`; at a stop it has `patience_s` more, then it is cancelled."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({work}, timeout=patience_s)
        finally:
            work.cancel()
            stopping.cancel()
            await asyncio.wait({work, stopping})

    async def _take_or_end(self) -> Sequence[TakenGroup]:
        source, old_step = self._ports.source, self._run.old_step(self.state.step)
        taken = await source.next_groups(self._trainer.num_missing_groups, _BLOCK_S, old_step)
        self._is_solved = not taken and await source.is_training_ended(self.state.lineage)
        # A Redis that lost its last writes gives groups again.
        return [one for one in taken if not self._progress.holds(one[0])]

    async def _work(self, timing: Timing) -> None:
        await self._compute(timing, self._trainer.work)
        await self._quarantine_found()

    async def _add(self, taken: Sequence[TakenGroup]) -> list[TrajectoryGroup]:
        """Add groups to the step and give refused ones back; returns those added."""
        kept: list[TrajectoryGroup] = []
        for entry_id, num_bytes, group in taken:
            prepared = await self._prepare(group)
            self._progress.saw(group.group_index)
            if prepared.drop_reason:
                await self._ports.source.mark_dropped([entry_id], prepared.drop_reason)
                continue
            self._trainer.add(prepared)
            self._progress.hold(entry_id, group.group_id, num_bytes)
            kept.append(group)
        metrics.RETAINED_BYTES.set(self._progress.retained_bytes)
        return kept

    async def _prepare(self, group: TrajectoryGroup) -> PreparedGroup:
        if asked := self._builder.unknown_versions(group, self._versions):
            self._versions = newest_versions(self._versions | await self._ports.versions.of(asked))
            if unknown := asked - self._versions.keys():
                log.error("tokens of unrecorded versions", group_id=group.group_id, versions=unknown)
        prepared = self._builder.prepare(group, self.state.step, self._versions)
        observe_group(prepared)
        return prepared

    async def _quarantine_found(self) -> None:
        """Report servers that passes found wrong; later groups come without their tokens."""
        found: list[ServerQuarantined] = []
        for event in self._trainer.quarantined:
            source = source_of(event.server_id, event.incarnation)
            if source not in self._quarantine:
                self._quarantine[source] = event.good_step
                found.append(event)
        if found:
            observe_quarantine(found)
            self._progress.quarantined(self._quarantine)
            await self._ports.events.emit(SERVICE, *found)

    def _keep_trajectories(self, groups: Sequence[TrajectoryGroup]) -> None:
        if self._ports.trajectories is None:
            return
        try:
            self._ports.trajectories.append(self.state.step, self.state.lineage, groups)
        except OSError as error:
            metrics.FAILED_TRAJECTORY_FILES.inc()
            remedy = "free space on the disk of output_dir"
            log.error("trajectories not kept", step=self.state.step, error=str(error), remedy=remedy)

    # Versions

    async def _publish(self, weights: Sequence[TensorBytes], finished: StepFinished) -> None:
        with span("publish weights", step=finished.step):
            version = await self._offer(weights, finished.step)
        await self._tell(msgspec.structs.replace(finished, policy_version=version))
        self._progress.published(version)
        if finished.step % self._run.logging_steps == 0:
            shown = {key: finished.metrics.get(key) for key in _LOGGED}
            log.info("step finished", step=finished.step, policy_version=version, **shown)

    async def _tell(self, finished: StepFinished) -> None:
        await self._ports.events.emit(SERVICE, finished, once=name_of(finished))
        self._progress.told(finished)
        for notify in self._ports.on_step_finished:
            notify(finished.step)

    async def _offer(self, weights: Sequence[TensorBytes], step: int) -> int:
        began_s = self._ports.clock.monotonic_s()
        lineage = self.state.lineage
        version = await self._ports.weights.publish(
            weights, lineage=lineage, optimizer_step=step, base_version=self._base_version
        )
        metrics.PUBLISH_SECONDS.observe(self._ports.clock.monotonic_s() - began_s)
        return version

    async def _published(self) -> None:
        """Wait until the last step's weights are published; raises the error of the publication.

        A stop waits a little, then tells the step without a version, if the outbox takes it.
        """
        if self._publishing is None:
            return
        publishing, self._publishing = self._publishing, None
        patience_s = _PATIENCE * self._config.drain_s
        await self._unless_stopped(publishing, patience_s)
        if not publishing.cancelled():
            publishing.result()
            return
        log.warning("stopped before the weights were published", step=self.state.step)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for finished in self.state.untold_steps:
                    await self._tell(finished)

    # Checkpoints

    async def _save_if_due(self, tasks: asyncio.TaskGroup) -> None:
        progress = self._progress
        is_early = self._ports.source.is_nearly_full and progress.has_unsaved_steps
        if not (progress.is_save_due or is_early):
            return
        await self._published()
        await self._saved()  # one at a time: a slow disk slows the steps
        copy, state = await self._copy()
        self._saving = tasks.create_task(self._save(copy, state), name="save")

    async def _save_last(self) -> None:
        """Repeat until the last checkpoint is on disk; at a stop, try once."""
        await self._saved()
        progress, is_early = self._progress, self._stopping.is_set() or self._is_solved
        is_due = progress.has_unsaved_steps if is_early else progress.is_save_overdue
        while is_due:
            copy, state = await self._copy()
            await self._ports.device.give()
            await self._save(copy, state)
            is_due = progress.is_save_overdue and not self._stopping.is_set()
            if is_due:
                await self._ports.clock.sleep(_SAVE_AGAIN_S)
        if self._is_solved and not progress.is_save_overdue:
            await self._ports.events.emit(SERVICE, TrainingEnded(self.state.lineage, self.state.step))

    async def _copy(self) -> tuple[object, RunState]:
        """Copy the model between two passes; returns the copy and the state for its checkpoint."""
        await self._ports.device.take()
        copy = await self._ports.compute(self._ports.take_snapshot)
        return copy, self._progress.saving(self._ports.clock.unix_s())

    async def _save(self, copy: object, state: RunState) -> None:
        """Write a checkpoint beside the training, and release its groups once it is durable."""
        ports, progress = self._ports, self._progress
        began_s = ports.clock.monotonic_s()
        try:
            path = await asyncio.to_thread(ports.checkpoints.write, copy, state)
        except OSError as error:
            progress.not_saved()
            metrics.FAILED_CHECKPOINTS.inc()
            log.error("checkpoint not saved", step=state.step, error=str(error))
            return
        metrics.CHECKPOINT_SECONDS.observe(ports.clock.monotonic_s() - began_s)
        await ports.source.commit_checkpoint(state.released_ids, saved_event(state, str(path)))
        progress.saved()
        metrics.RETAINED_BYTES.set(progress.retained_bytes)
        lineages = {state.lineage, *(ancestor.lineage for ancestor in state.ancestors)}
        await asyncio.to_thread(ports.checkpoints.prune, self._config.save_total_limit, lineages)
        log.info("checkpoint saved", step=state.step, path=str(path), num_groups=len(state.group_ids))

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written; raises its error."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    # Time

    async def _waited(self, timing: Timing, waiting: Awaitable[T]) -> T:
        began_s = self._ports.clock.monotonic_s()
        result = await waiting
        timing.wait_s += self._ports.clock.monotonic_s() - began_s
        return result

    async def _compute(self, timing: Timing, work: Callable[[], T]) -> T:
        clock = self._ports.clock
        began_s, began_unix_s = clock.monotonic_s(), clock.unix_s()
        result = await self._ports.compute(work)
        timing.busy_s += clock.monotonic_s() - began_s
        if result and not timing.first_pass_unix_s:
            timing.first_pass_unix_s = began_unix_s
        return result
