"""The process of a learner or of a rank: loads or makes the model, connects the parts and runs.

Order of the start: model, model card, warm start, optimizer, release of the checkpoint's groups, event
of the new lineage, first checkpoint of the lineage, first version; then the steps.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Set
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tailrace.clock import SystemClock
from tailrace.config import ConfigError, RunConfig
from tailrace.device_turn import DeviceTurn
from tailrace.log import get_logger
from tailrace.object_store import fetched, is_url
from tailrace.runtime import Args, Service, StopService, serve
from tailrace.store import Blobs, Outbox, TrajectoryBuffer, Versions, connect
from tailrace.weights import WeightPublisher
from tailrace_learner.adapters.checkpoint_copies import CheckpointCopies
from tailrace_learner.adapters.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
)
from tailrace_learner.adapters.compute_thread import ComputeThread, keep_freed_memory
from tailrace_learner.adapters.device import LearnerDevice
from tailrace_learner.adapters.launcher import checked_config
from tailrace_learner.adapters.nodes import Nodes, when_a_node_stops
from tailrace_learner.adapters.rank_controller import RankController
from tailrace_learner.adapters.rank_start import gather_ranks, join_ranks
from tailrace_learner.adapters.ranks import launched_rank
from tailrace_learner.adapters.trackers import MakeTracker, tracker_makers
from tailrace_learner.adapters.trackers.feed import TrackerFeed
from tailrace_learner.adapters.trackers.row_file import RowFile
from tailrace_learner.adapters.trajectory_files import TrajectoryFiles
from tailrace_learner.adapters.user_functions import demonstrations
from tailrace_learner.config import LearnerConfig, WarmStart
from tailrace_learner.core.batch.group_returns import limits_of
from tailrace_learner.core.step.optimizer import try_optimizer
from tailrace_learner.core.step.progress import name_of, saved_event
from tailrace_learner.core.step.run_state import (
    Origin,
    RunState,
    changed_keys,
    first_state,
    origin,
    resumed_state,
)
from tailrace_learner.core.step.warm_start import DivergedError, TooFewDemonstrationsError, checked
from tailrace_learner.handlers import SERVICE, Learner, LearnerPorts
from tailrace_learner.ports import OWN_DEVICE
from tailrace_protos.base import encode_json
from tailrace_protos.event import LearnerResumed, ModelPrepared, WarmStartAdvanced

log = get_logger(__name__)

_LOG_EVERY = 20  # warm-start steps


class _Process:
    """Parts of a running learner, and the order in which they start."""

    def __init__(self, args: Args) -> None:
        self.args, self.run = args, args.run
        self.config = checked_config(args)
        self.trackers = tracker_makers(args.run, self.config.chosen_trackers)
        try_optimizers(self.config)
        # As JSON has it, so that it equals the copy in a checkpoint.
        self.experiment = msgspec.json.decode(encode_json(args.experiment), type=dict[str, Any])
        self.service = Service(
            SERVICE, args.run, args.endpoints, instance_id=args.instance_id, drain_s=self.config.drain_s
        )
        self.compute = ComputeThread(self.config.num_threads)
        url = self.config.checkpoint_url
        copies = CheckpointCopies(url, self.run.exp_name) if url else None
        self.folder = CheckpointFolder(self.run.run_dir, copies)
        self.learner: Learner | None = None
        self.service.on_start(self.start)

    async def start(self) -> None:
        """Prepare the model, publish its first version, then start the steps."""
        service, name = self.service, self.run.exp_name
        keep_freed_memory()
        service.on_drain(self.compute.close)
        redis = await connect(service.endpoints.redis_url)
        service.on_drain(redis.aclose)
        self.buffer, self.outbox = TrajectoryBuffer(redis, name), Outbox(redis, name)
        self.blobs, self.versions = Blobs(redis, name), Versions(redis, name)
        self.turn = await self.first_turn()
        known = {lineage for lineage, _ in (await self.versions.all()).values()}
        checkpoint = await asyncio.to_thread(self.find_checkpoint, known)
        self.learner = learner = await self.prepare(checkpoint)
        state = learner.state
        if checkpoint is not None:
            leftovers = checkpoint.state
            await self.tell_untold(checkpoint)
            await self.buffer.commit_checkpoint(
                leftovers.released_ids, saved_event(leftovers, str(checkpoint.path))
            )
        await self.buffer.rebase_credit(state.num_trained_groups)
        counters = await self.buffer.counters()
        resumed = LearnerResumed(
            lineage=state.lineage,
            step=state.step,
            next_group_index=max(state.next_group_index, counters.next_group_index),
            checkpoint="" if checkpoint is None else str(checkpoint.path),
        )
        await self.outbox.emit(SERVICE, resumed)
        if self.is_worth_saving(checkpoint, known):
            await learner.save_first()  # before Redis knows a version, which makes this run a live one
        await learner.publish_start()
        log.info(
            "lineage started", lineage=state.lineage, step=state.step, checkpoint=resumed.checkpoint
        )
        service.on_stop(learner.stop)
        service.loop("steps", learner.run_forever)

    async def tell_untold(self, checkpoint: Checkpoint) -> None:
        """Emit what the learner that saved could not tell; another run's steps are not this one's."""
        if checkpoint.path.parent == self.folder.root.absolute():
            for finished in checkpoint.state.untold_steps:
                await self.outbox.emit(SERVICE, finished, once=name_of(finished))

    async def first_turn(self) -> DeviceTurn | None:
        """Takes the device before servers get theirs; None if it is not shared."""
        if not self.run.colocated:
            return None
        turn = DeviceTurn(self.run.run_dir / "state", self.service.endpoints.host_id, "learner")
        self.service.on_drain(turn.aclose)
        await turn.take()
        return turn

    def find_checkpoint(self, known: Set[str]) -> Checkpoint | None:
        """Find the checkpoint to continue from, if any; `known`: lineages of this run in Redis."""
        self.folder.sweep()
        resume = self.run.resume_from_checkpoint
        if known or resume is True:
            self.folder.restore(known or None)
        found = self.folder.newest(known)
        match origin(resume, has_saved=found is not None):
            case Origin.LIVE | Origin.NEW:
                pass
            case Origin.NAMED:
                found = _named_checkpoint(str(resume))
            case Origin.NEWEST:
                found = self._newest_of_any_run(known)
        if found is not None:
            self._take_up(found, str(resume))
        return found

    def _take_up(self, found: Checkpoint, resume: str) -> None:
        """Fetch what the checkpoint's run began with; tell what the experiment has changed since."""
        is_fetched = found.path.parent != self.folder.root.absolute() and is_url(resume)
        self.folder.restore_start(found.state, resume if is_fetched else "")
        if keys := changed_keys(found.state, self.experiment):
            log.warning("the experiment changed since the checkpoint was saved", keys=keys)

    def _newest_of_any_run(self, known: Set[str]) -> Checkpoint | None:
        found = self.folder.newest()
        if found is None and not known:
            raise ConfigError(
                f"resume_from_checkpoint: there is no checkpoint in {self.folder.root}: "
                "set it to false to start anew"
            )
        return found

    def is_worth_saving(self, checkpoint: Checkpoint | None, known: Set[str]) -> bool:
        """True if a restarted learner would otherwise prepare the model again, or need the checkpoint
        of another run, which may be gone by then.
        """
        if checkpoint is None:
            return bool(self.config.from_scratch or self.config.warm_start)
        return checkpoint.state.lineage not in known

    async def prepare(self, checkpoint: Checkpoint | None) -> Learner:
        """Prepare model, card, optimizer and state; only a new run warm-starts."""
        self.trainer = await self.compute(gather_ranks, self.run, self.config)
        if isinstance(self.trainer, RankController):
            self.service.on_drain(partial(self.compute, self.trainer.end))
            self.end_with_any_node()
        path = "" if checkpoint is None else str(checkpoint.path)
        await self.compute(self.trainer.load, path)
        await self.blobs.put_model_card(self.trainer.card)
        if checkpoint is None:
            await self.begin()
            state = msgspec.structs.replace(first_state(), experiment=self.experiment)
        else:
            state = resumed_state(checkpoint.state, self.experiment)
        await self.compute(self.trainer.restore, path)
        return self.put_together(msgspec.structs.replace(state, reference=self.trainer.reference))

    def end_with_any_node(self) -> None:
        """Save and end when another node is told to end: its ranks go `drain_s` later."""
        nodes, loop, context = Nodes.from_env(), asyncio.get_running_loop(), copy_context()

        async def end(reason: str) -> None:
            # Before the drain, in which a signal of this node would end the wait for the checkpoint.
            if self.learner is not None:
                await self.learner.stop()
            self.service.stop(reason)

        def tell(reason: str) -> None:
            loop.call_soon_threadsafe(
                lambda: self.service.spawn(end(reason), "end of the nodes"), context=context
            )

        if nodes.num > 1:
            when_a_node_stops(nodes, tell)

    async def begin(self) -> None:
        """Warm-start a new model if the experiment asks for it, and emit `ModelPrepared`."""
        began_s, warm, loss = time.monotonic(), self.config.warm_start, math.nan
        if warm is not None:
            loss = await self.compute(self.warm_start, warm, asyncio.get_running_loop())
        prepared = ModelPrepared(
            num_parameters=self.trainer.num_parameters,
            warm_start_steps=0 if warm is None else warm.num_steps,
            warm_start_s=0.0 if warm is None else time.monotonic() - began_s,
            warm_start_loss=None if math.isnan(loss) else loss,
            forward_path=self.trainer.path.name,
            slower_because=self.trainer.path.reason,
        )
        await self.outbox.emit(SERVICE, prepared)

    def warm_start(self, warm: WarmStart, loop: asyncio.AbstractEventLoop) -> float:
        """Run the supervised steps; a drain ends them early. `loop` emits the events of progress."""

        def on_step(step: int, loss: float) -> None:
            if self.service.draining.is_set():
                raise StopService(0, "drained during the warm start")
            if 100 * step // warm.num_steps > 100 * (step - 1) // warm.num_steps:
                advanced = WarmStartAdvanced(step, warm.num_steps, loss)
                # Not awaited: it is for views alone, which may lose it while Redis is away.
                asyncio.run_coroutine_threadsafe(self.outbox.emit(SERVICE, advanced), loop)
            if step % _LOG_EVERY == 0 or step == warm.num_steps:
                log.info("warm start", step=step, num_steps=warm.num_steps, loss=loss)

        rows = demonstrations(warm, self.trainer.card, self.run.chat, self.run.seed)
        try:
            return checked(self.trainer.warm_start(rows, on_step))
        except (DivergedError, TooFewDemonstrationsError) as error:
            raise ConfigError(str(error)) from error

    def put_together(self, state: RunState) -> Learner:
        """Connect the learner to everything outside of it."""
        run, config, service = self.run, self.config, self.service
        weights = WeightPublisher(
            service.bus, run.exp_name, service.endpoints.host_id, bind_host=config.bind_host
        )
        service.on_drain(weights.close)
        feeds = tracker_feeds(run, self.trackers, state.step)
        for feed in feeds:
            service.on_drain(feed.close)
            feed.start()
        ports = LearnerPorts(
            source=self.buffer,
            events=self.outbox,
            versions=self.versions,
            weights=weights,
            checkpoints=self.folder,
            compute=self.compute,
            clock=SystemClock(),
            read_weights=self.trainer.weights,
            take_snapshot=self.trainer.snapshot,
            on_step_finished=[feed.reached for feed in feeds],
            device=OWN_DEVICE
            if self.turn is None
            else LearnerDevice(self.turn, self.compute, self.trainer),
            trajectories=TrajectoryFiles(run.run_dir) if config.save_trajectories else None,
        )
        return Learner(ports, self.trainer, run, config, state, limits_of(self.trainer.card))


def tracker_feeds(run: RunConfig, makers: Mapping[str, MakeTracker], step: int) -> list[TrackerFeed]:
    """Feeds that bring the rows of `metrics.jsonl` to the trackers; not started."""
    path = run.run_dir / "metrics.jsonl"
    return [TrackerFeed(name, make, RowFile(path), step) for name, make in makers.items()]


def try_optimizers(config: LearnerConfig) -> None:
    """Raise `ConfigError` if an optimizer of the experiment does not work."""
    used = {"training_args": config.training_args}
    if config.critic is not None:
        used["critic.training_args"] = config.critic.training_args
    for section, args in used.items():
        try:
            try_optimizer(args, f"learner.{section}")
        except ValueError as error:
            raise ConfigError(str(error)) from error


def build(args: Args) -> Service:
    """Build the service without starting it."""
    return _Process(args).service


def _named_checkpoint(name: str) -> Checkpoint:
    """The checkpoint in a folder or at a URL."""
    return read_checkpoint(fetched(name, "resume_from_checkpoint") if is_url(name) else Path(name))


def run(args: Args) -> int:
    """Run as the service, alone or as rank 0, or as a mirror of it; returns the exit code."""
    if launched_rank():
        return join_ranks(args.run, checked_config(args), args.instance_id)
    return serve(build, args)
