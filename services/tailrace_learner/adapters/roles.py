"""Makes the models beside the policy: the reference and the critic, new or from a checkpoint.

Every rank has them whole, except for a sharded reference. Both begin with the policy's first weights
unless the configuration names others. A reference keeps its weights through every resume; a digest
checks that.

The weights of a run's start are those of `pretrain`. A run that begins from scratch or warm-starts
keeps them in `<run_dir>/start/`, a model directory like that of a checkpoint. A run directory may be
moved, or come back from an object store.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tailrace.chat.model_files import Vocabulary, check_same_tokens
from tailrace.config import ConfigError, RunConfig
from tailrace_learner.adapters.checkpoints import START_FOLDER, read_checkpoint
from tailrace_learner.adapters.hf_model import TrainableModel, load_model, make_policy, narrow
from tailrace_learner.adapters.snapshots import host_weights, load_critic
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.config import LearnerConfig, ReferenceArgs
from tailrace_learner.core.model.critic import Critic, make_head
from tailrace_learner.core.model.forward_path import decoder_of
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.run_state import ReferenceState, RunState

_REFERENCE_KEY = "learner.reference.pretrain"
_CRITIC_KEY = "learner.critic.pretrain"


class RoleMaker:
    """Makes the configured models; `checkpoint` is empty for a new run (collective)."""

    def __init__(
        self,
        run: RunConfig,
        config: LearnerConfig,
        loaded: TrainableModel,
        policy: PolicyModel,
        strategy: Strategy,
        checkpoint: str,
    ) -> None:
        self._run = run
        self._config = config
        self._policy = policy
        self._strategy = strategy
        self._loaded = loaded
        self._checkpoint = checkpoint
        self._saved: RunState | None = read_checkpoint(Path(checkpoint)).state if checkpoint else None
        self._start: Callable[[], str] = cache(lambda: keep_start(run, config, loaded, strategy))
        self.reference: ReferenceState | None = None  # of the reference, once it is made

    @property
    def kl_coef(self) -> float | None:
        """Weight of the divergence in the checkpoint; None for the configuration's."""
        return self._saved.kl_coef if self._saved is not None and self._config.target_kl else None

    def make(self) -> Roles:
        """Make the reference and the critic, each if the configuration uses it."""
        reference = self._reference() if self._config.needs_reference else None
        critic = self._critic() if self._config.critic is not None else None
        return Roles(reference, critic)

    def _reference(self) -> Reference:
        args = self._config.reference or ReferenceArgs()
        known = self._saved.reference if self._saved is not None else None
        source = args.pretrain or self._first_weights(known)
        loaded = self._load(source, _REFERENCE_KEY)
        self.reference = ReferenceState(source=absolute(source), digest=weights_digest(loaded.model))
        if known is not None and known.digest != self.reference.digest:
            raise ConfigError(
                f"{_REFERENCE_KEY}: {source} does not hold the weights that were the run's reference "
                f"when it began (they came from {known.source}): put them back, or begin a new run"
            )
        loaded.model.requires_grad_(False)
        policy = make_policy(loaded, self._config)
        if args.sharded:
            policy = self._strategy.spread(policy)
            return Reference(policy, self._config, holders=self._strategy.world)
        loaded.model.to(policy.device)
        if policy.autocast:
            narrow(loaded.model)
        return Reference(policy, self._config, offload=args.offload)

    def _first_weights(self, known: ReferenceState | None) -> str:
        if self._saved is None:
            return self._start()
        found = known.source if known is not None else pretrained_start(self._run, self._config)
        if not found:
            raise ConfigError(
                f"{_REFERENCE_KEY}: the run began without a reference and the weights of its "
                f"start were not kept: name some, for example {self._checkpoint}"
            )
        here = self._run.run_dir / START_FOLDER
        is_gone = Path(found).is_absolute() and not Path(found).is_dir()
        return str(here) if is_gone and here.is_dir() else found

    def _critic(self) -> CriticTrainer:
        config, args = self._config, self._config.critic
        assert args is not None
        trunk = self._policy if args.shared else self._trunk(args.pretrain)
        head = make_head(_width(trunk.model.config.get_text_config()), trunk.device)
        critic = Critic(trunk, head, args)
        optimizer = SummedOptimizer.of(critic.parameters, args.training_args)
        if self._checkpoint:
            load_critic(Path(self._checkpoint), critic, optimizer, args.training_args.optimizer)
        return CriticTrainer(critic, optimizer, config, max_steps=self._run.max_steps)

    def _trunk(self, pretrain: str) -> PolicyModel:
        """Load a model without its output matrix."""
        source = pretrain or self._checkpoint or self._start()
        loaded = self._load(source, _CRITIC_KEY, needs_head=False)
        policy = make_policy(loaded, self._config)
        loaded.model.to(policy.device)
        return replace(policy, model=decoder_of(loaded.model))

    def _load(self, source: str, key: str, *, needs_head: bool = True) -> TrainableModel:
        loaded = load_model(source, self._config, key, needs_head=needs_head)
        check_same_tokens(key, source, _vocabulary(self._loaded), _vocabulary(loaded))
        return loaded


def _vocabulary(loaded: TrainableModel) -> Vocabulary:
    num_vectors = int(loaded.model.config.get_text_config().vocab_size)
    return Vocabulary(loaded.tokenizer.get_vocab(), num_vectors)


def _width(text_config: Any) -> int:
    """Size of the hidden states that the output matrix reads; OPT may make its own smaller."""
    return int(getattr(text_config, "word_embed_proj_dim", 0) or text_config.hidden_size)


def pretrained_start(run: RunConfig, config: LearnerConfig) -> str:
    """Name of the model that the run begins with; empty if no model has these weights."""
    return "" if config.from_scratch or config.warm_start else run.pretrain


def keep_start(
    run: RunConfig, config: LearnerConfig, loaded: TrainableModel, strategy: Strategy
) -> str:
    """Keep the current weights, those of the start; returns where to load them from (collective)."""
    if found := pretrained_start(run, config):
        return found
    folder = run.run_dir / START_FOLDER
    weights = host_weights(loaded.model, strategy)
    if strategy.world.rank == 0:
        part = folder.with_name(".part-start")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        loaded.model.save_pretrained(part, state_dict=weights)
        loaded.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    strategy.world.collect(None)  # no rank reads before it is written
    return str(folder)


def weights_digest(model: Any) -> str:
    """Digest of names and weights; equal for equal weights, wherever they were loaded from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def absolute(source: str) -> str:
    """Full path of a directory; a name of the hub unchanged."""
    path = Path(os.path.expanduser(source))
    return str(path.absolute()) if path.is_dir() else source
