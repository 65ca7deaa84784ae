"""One rank of the learner: the model, its optimizer and its trainer.

Every rank mirrors rank 0: all ranks get the same calls with the same arguments, in the same order
(`adapters/rank_controller.py`). Only rank 0 gets weights and snapshots.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tailrace.config import ConfigError, RunConfig
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters import hf_model, lora
from tailrace_learner.adapters.checkpoints import check_compatible
from tailrace_learner.adapters.memory import WorkerMemory
from tailrace_learner.adapters.roles import RoleMaker
from tailrace_learner.adapters.shard_export import export_shards
from tailrace_learner.adapters.snapshots import (
    CRITIC_OPTIMIZER_FILE,
    Snapshot,
    critic_tensors,
    load_optimizer,
    take_snapshot,
)
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.user_functions import own_metrics
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.metrics import Metrics
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.model.forward_path import ForwardPath
from tailrace_learner.core.step.step import StepTrainer
from tailrace_learner.core.step.warm_start import warm_start
from tailrace_protos.event import ServerQuarantined

OnStep = Callable[[int, float], None]


class Worker:
    """One rank's part of the learner. `load` first, then an optional `warm_start`, then `restore`."""

    def __init__(self, run: RunConfig, config: LearnerConfig, strategy: Strategy) -> None:
        self._run = run
        self._config = config
        self._strategy = strategy

    def load(self, checkpoint: str) -> None:
        """Load the model of a checkpoint's folder; an empty path loads the model of a new run."""
        if checkpoint:
            self.loaded = hf_model.load_model(checkpoint, self._config, "resume_from_checkpoint")
            check_compatible(checkpoint, self.loaded, self._run, self._config)
        else:
            self.loaded = hf_model.first_model(self._run, self._config)
        self._adapt(checkpoint)
        self.card = hf_model.model_card(self.loaded, self._config)
        self.num_parameters = self.loaded.num_parameters
        self._policy = self._strategy.spread(hf_model.make_policy(self.loaded, self._config))

    @property
    def path(self) -> ForwardPath:
        """Way of rows through the model."""
        return self._policy.path

    def warm_start(self, rows: Iterator[TrainingRow], on_step: OnStep) -> float:
        """Do supervised steps on `rows`, the same on all ranks; returns the last step's mean loss."""
        warm, ranks = self._config.warm_start, self._strategy.ranks
        assert warm is not None
        optimizer = self._strategy.make_optimizer(self._policy, warm.training_args)
        return warm_start(self._policy, rows, warm, self._config, on_step, optimizer, ranks)

    def restore(self, checkpoint: str) -> None:
        """Make optimizer, reference, critic and trainer, from a checkpoint unless the path is empty."""
        args = self._config.training_args
        optimizer = self._strategy.make_optimizer(self._policy, args)
        if checkpoint:
            load_optimizer(Path(checkpoint), self.loaded, self._strategy, args.optimizer)
        maker = RoleMaker(
            self._run, self._config, self.loaded, self._policy, self._strategy, checkpoint
        )
        roles = maker.make()
        self._critic, self.reference = roles.critic, maker.reference
        self._trainer = StepTrainer(
            self._policy,
            optimizer,
            self._config,
            groups_per_step=self._run.groups_per_step,
            max_steps=self._run.max_steps,
            ranks=self._strategy.ranks,
            roles=roles,
            kl_coef=maker.kl_coef,
            num_old_versions=min(self._config.mismatch_versions, self._run.max_staleness),
            own_metrics=() if self._strategy.world.rank else own_metrics(self._config),
        )
        self._memory = WorkerMemory(self, self._policy.device)

    # Steps

    def begin(self, step: int) -> None:
        """Begin a step with the current weights, after `step` finished steps."""
        self._trainer.begin(step)

    @property
    def num_missing_groups(self) -> int:
        """Groups that the step still needs."""
        return self._trainer.num_missing_groups

    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step."""
        return self._trainer.quarantined

    def add(self, group: PreparedGroup) -> None:
        """Take a group into the step."""
        self._trainer.add(group)

    def add_all(self, groups: Iterable[PreparedGroup]) -> None:
        """Take groups into the step."""
        for group in groups:
            self._trainer.add(group)

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now; False if there were none."""
        return self._trainer.work()

    def finish(self) -> Metrics:
        """Do the rest of the step and return its metrics."""
        return self._trainer.finish()

    # Device

    def sleep(self) -> None:
        """Move everything to the host, on all ranks (collective); the next call is `wake`."""
        self._memory.free()
        self._strategy.world.collect(None)

    def wake(self) -> None:
        """Move everything back to the device."""
        self._memory.restore()

    # Results

    @torch.no_grad()
    def weights(self, is_whole: bool) -> list[TensorBytes]:
        """Copy the weights to the host, under their Hugging Face names (collective).

        `is_whole`: all weights and the adapters; otherwise the adapters alone, if there are any.
        """
        dtype, strategy = self._config.model_args.dtype, self._strategy
        copies: list[TensorBytes] = []
        if strategy.cuts_rows:
            parts = list(self._own_weights(is_whole))
            copies += export_shards(parts, getattr(torch, dtype), strategy.world) if parts else []
            gathered = lora.published_adapters(self.loaded.model, strategy.whole)
        else:
            gathered = self._gathered(is_whole)
        for name, tensor in gathered:
            if strategy.world.rank == 0:
                copies.append(hf_model.tensor_bytes(name, tensor, dtype))
        return copies

    def _own_weights(self, is_whole: bool) -> Iterator[tuple[str, Tensor]]:
        """The model's own weights that are to be published, as this rank has them."""
        if is_whole or self._config.lora is None:
            for name, tensor in hf_model.named_weights(self.loaded.model):
                if not lora.is_adapter(name):
                    yield lora.plain_name(name), tensor

    def _gathered(self, is_whole: bool) -> Iterator[tuple[str, Tensor]]:
        whole = self._strategy.whole
        for name, tensor in self._own_weights(is_whole):
            yield name, whole(tensor)
        yield from lora.published_adapters(self.loaded.model, whole)

    def _adapt(self, checkpoint: str) -> None:
        """Put adapters into the model; refuse a checkpoint with adapters if `lora` is not set."""
        folder = Path(checkpoint)
        if self._config.lora is None:
            if checkpoint and (folder / lora.LORA_FILE).exists():
                raise ConfigError(
                    f"resume_from_checkpoint: {folder} holds adapters: give learner.lora as it was, or "
                    "begin a new run with pretrain: that folder (their sum is in its weights)"
                )
            return
        lora.add_adapters(self.loaded.model, self._config.lora, self._run.seed)
        if checkpoint:
            lora.restore_adapters(self.loaded.model, folder)
        hf_model.pick_path(self.loaded.model, self._config)

    def snapshot(self) -> Snapshot:
        """Copy the contents of a checkpoint (collective)."""
        copy = take_snapshot(self.loaded, self._strategy, self._config.training_args.optimizer)
        if self._critic is None or self._strategy.world.rank:
            return copy
        assert self._config.critic is not None
        others = critic_tensors(self._critic.critic, self._critic.optimizer)
        named = {CRITIC_OPTIMIZER_FILE: self._config.critic.training_args.optimizer}
        return copy._replace(others={**copy.others, **others}, optimizers={**copy.optimizers, **named})
