"""The learner's process: loads or makes the model, puts the parts together, runs.

Order of the start: model, card, optimizer, warm start, credit and leftovers of the checkpoint, the
event of the new lineage, first version; then steps.
"""

from __future__ import annotations

import hashlib
import math
import time

import msgspec
import torch

from tailrace.clock import SystemClock
from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.runtime import Args, Service, StopService, run_service
from tailrace.store import Blobs, Outbox, TrajectoryBuffer, Versions, connect
from tailrace.weights import WeightPublisher
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.allocator import keep_freed_memory
from tailrace_learner.adapters.checkpoints import (
    BoundStore,
    Checkpoint,
    CheckpointFolder,
    load_optimizer,
    named_checkpoint,
)
from tailrace_learner.adapters.compute_thread import ComputeThread
from tailrace_learner.adapters.demonstrations import demonstrations
from tailrace_learner.adapters.hf_model import LoadedModel
from tailrace_learner.adapters.tensorboard import TensorboardWriter
from tailrace_learner.adapters.trajectory_files import TrajectoryFiles
from tailrace_learner.config import LearnerConfig, WarmStart, check_with_run
from tailrace_learner.core.books import saved_event
from tailrace_learner.core.optimizer import make_adamw
from tailrace_learner.core.policy import Policy
from tailrace_learner.core.run_state import RunState, first_state, resumed_state
from tailrace_learner.core.start import Origin, origin
from tailrace_learner.core.step import StepTrainer
from tailrace_learner.core.warm_start import TooFewDemonstrationsError, warm_start
from tailrace_learner.handlers import SERVICE, Learner, World
from tailrace_protos.base import encode_json
from tailrace_protos.event import LearnerResumed, ModelPrepared
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)

_LOG_EVERY = 20  # warm-start steps


class _Process:
    """The parts of a running learner and the order in which they start."""

    def __init__(self, args: Args) -> None:
        self.args, self.run = args, args.run
        self.config = args.section("learner", LearnerConfig)
        try:
            check_with_run(self.config, self.run)
        except ValueError as error:
            raise ConfigError(f"{args.config}: {error}") from error
        self.digest = hashlib.sha256(encode_json(args.experiment)).hexdigest()
        self.service = Service(SERVICE, args.run, args.endpoints, instance_id=args.instance_id)
        self.compute = ComputeThread(self.config.num_threads)
        self.folder = CheckpointFolder(self.run.run_dir)
        self.service.on_start(self.start)

    async def start(self) -> None:
        """Everything up to the first published version; then the steps begin."""
        service, name = self.service, self.run.exp_name
        keep_freed_memory()
        service.on_drain(self.compute.close)
        redis = await connect(service.endpoints.redis_url)
        service.on_drain(redis.aclose)
        self.buffer, self.outbox = TrajectoryBuffer(redis, name), Outbox(redis, name)
        self.blobs, self.versions = Blobs(redis, name), Versions(redis, name)
        checkpoint = await self.find_checkpoint()
        learner = await self.prepare(checkpoint)
        state = learner.state
        if checkpoint is not None:
            leftovers = checkpoint.state
            await self.buffer.commit_checkpoint(
                leftovers.entry_ids, saved_event(leftovers, str(checkpoint.path))
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
        if checkpoint is None and (self.config.from_scratch or self.config.warm_start):
            await learner.save_first()
        await learner.publish_start()
        log.info(
            "lineage started", lineage=state.lineage, step=state.step, checkpoint=resumed.checkpoint
        )
        service.loop("steps", learner.run_forever)

    async def find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from, if any."""
        known = await self.versions.all()
        self.folder.sweep()
        resume = self.run.resume_from_checkpoint
        match origin(resume, is_live=bool(known)):
            case Origin.LIVE:
                found = self.folder.newest_of({lineage for lineage, _ in known.values()})
            case Origin.NAMED:
                found = named_checkpoint(str(resume))
            case Origin.NEWEST:
                found = self.folder.newest()
                if found is None:
                    raise ConfigError(
                        f"resume_from_checkpoint: there is no checkpoint in {self.folder.root}: "
                        "set it to false to start anew"
                    )
            case Origin.NEW:
                found = None
        if found is not None and found.state.config_digest != self.digest:
            log.warning("the experiment changed since the checkpoint was saved", path=str(found.path))
        return found

    async def prepare(self, checkpoint: Checkpoint | None) -> Learner:
        """Model, card, optimizer and state; a warm start only for a run that begins."""
        if checkpoint is None:
            loaded = await self.compute(hf_model.first_model, self.run, self.config)
        else:
            loaded = await self.compute(
                hf_model.load_model, str(checkpoint.path), self.config, "resume_from_checkpoint"
            )
        card = hf_model.model_card(loaded, self.config)
        await self.blobs.put_model_card(card)
        policy = hf_model.make_policy(loaded, self.config)
        optimizer = make_adamw(policy.parameters, self.config.training_args)
        if checkpoint is None:
            await self.begin(loaded, policy, card)
            state = msgspec.structs.replace(first_state(), config_digest=self.digest)
        else:
            load_optimizer(checkpoint.path, loaded.model, optimizer)
            state = resumed_state(checkpoint.state, self.digest)
        return self.put_together(loaded, policy, optimizer, state)

    async def begin(self, loaded: LoadedModel, policy: Policy, card: ModelCard) -> None:
        """Warm-start a new model, if that is wanted, and say that it is ready."""
        began_s, warm, loss = time.monotonic(), self.config.warm_start, math.nan
        if warm is not None:
            loss = await self.compute(self.warm_start, warm, policy, card)
        prepared = ModelPrepared(
            num_parameters=loaded.num_parameters,
            warm_start_steps=0 if warm is None else warm.num_steps,
            warm_start_s=0.0 if warm is None else time.monotonic() - began_s,
            warm_start_loss=None if math.isnan(loss) else loss,
        )
        await self.outbox.emit(SERVICE, prepared)

    def warm_start(self, warm: WarmStart, policy: Policy, card: ModelCard) -> float:
        """Run the supervised steps; they end early when the service drains."""

        def on_step(step: int, loss: float) -> None:
            if self.service.draining.is_set():
                raise StopService(0, "drained during the warm start")
            if step % _LOG_EVERY == 0 or step == warm.num_steps:
                log.info("warm start", step=step, num_steps=warm.num_steps, loss=loss)

        rows = demonstrations(warm, card, self.run.chat, self.run.seed)
        try:
            return warm_start(policy, rows, warm, self.config, on_step)
        except TooFewDemonstrationsError as error:
            raise ConfigError(str(error)) from error

    def put_together(
        self, loaded: LoadedModel, policy: Policy, optimizer: torch.optim.AdamW, state: RunState
    ) -> Learner:
        """The learner and its world."""
        run, config, service = self.run, self.config, self.service
        weights = WeightPublisher(service.bus, run.exp_name, service.endpoints.host_id)
        service.on_drain(weights.close)
        writers = []
        if config.tensorboard:
            writers.append(TensorboardWriter(run.run_dir, state.step + 1))
            service.on_drain(writers[0].close)
        world = World(
            source=self.buffer,
            events=self.outbox,
            versions=self.versions,
            weights=weights,
            checkpoints=BoundStore(self.folder, loaded, optimizer),
            compute=self.compute,
            clock=SystemClock(),
            read_weights=lambda: hf_model.weight_bytes(loaded.model, config.model_args.dtype),
            writers=writers,
            trajectories=TrajectoryFiles(run.run_dir) if config.save_trajectories else None,
        )
        trainer = StepTrainer(
            policy, optimizer, config, groups_per_step=run.groups_per_step, max_steps=run.max_steps
        )
        return Learner(world, trainer, run, config, state)


def build(args: Args) -> Service:
    """The service, not started."""
    return _Process(args).service


def main() -> int:
    """Run until told to stop."""
    return run_service(build)


if __name__ == "__main__":
    raise SystemExit(main())
