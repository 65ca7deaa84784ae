"""Makes the models beside the policy: the reference and the critic, new or as a checkpoint has them.

Every rank has them whole, but for a reference that is cut over them. Both begin as the policy does
unless the configuration names other weights; a reference keeps them through every resume, which is
checked by a digest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from tailrace.config import ConfigError, RunConfig
from tailrace_learner.adapters.checkpoints import read_checkpoint
from tailrace_learner.adapters.critic_files import load_critic
from tailrace_learner.adapters.hf_model import LoadedModel, load_model, make_policy, narrow
from tailrace_learner.adapters.start_weights import (
    absolute,
    keep_start,
    pretrained_start,
    weights_digest,
)
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.config import LearnerConfig, ReferenceArgs
from tailrace_learner.core.model.critic import Critic, make_head
from tailrace_learner.core.model.policy import Policy
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.optimizer import make_adamw
from tailrace_learner.core.step.run_state import ReferenceState, RunState

_REFERENCE_KEY = "learner.reference.pretrain"
_CRITIC_KEY = "learner.critic.pretrain"


class RoleMaker:
    """Makes what the configuration wants; `checkpoint` is empty for a run that begins (collective)."""

    def __init__(
        self,
        run: RunConfig,
        config: LearnerConfig,
        loaded: LoadedModel,
        policy: Policy,
        strategy: Strategy,
        checkpoint: str,
    ) -> None:
        self._run = run
        self._config = config
        self._policy = policy
        self._strategy = strategy
        self._vocabulary = loaded.model.config.vocab_size
        self._checkpoint = checkpoint
        self._saved: RunState | None = read_checkpoint(Path(checkpoint)).state if checkpoint else None
        self._start: Callable[[], str] = cache(lambda: keep_start(run, config, loaded, strategy))
        self.reference: ReferenceState | None = None  # of the reference, once it is made

    @property
    def kl_coef(self) -> float | None:
        """The weight of the divergence to go on with; None: the configuration's."""
        return self._saved.kl_coef if self._saved is not None and self._config.target_kl else None

    def make(self) -> Roles:
        """The reference and the critic, each if something uses it."""
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
                f"{_REFERENCE_KEY}: the run began without a reference and nobody kept the weights of "
                f"its start: name some, for example {self._checkpoint}"
            )
        return found

    def _critic(self) -> CriticTrainer:
        config, args = self._config, self._config.critic
        assert args is not None
        trunk = self._policy if args.shared else self._trunk(args.pretrain)
        head = make_head(trunk.model.config.hidden_size, trunk.device)
        critic = Critic(trunk, head, args)
        optimizer = make_adamw(critic.parameters, args.training_args)
        if self._checkpoint:
            load_critic(Path(self._checkpoint), critic, optimizer)
        return CriticTrainer(critic, optimizer, config, max_steps=self._run.max_steps)

    def _trunk(self, pretrain: str) -> Policy:
        """A model without its output matrix."""
        loaded = self._load(pretrain or self._checkpoint or self._start(), _CRITIC_KEY)
        policy = make_policy(loaded, self._config)
        loaded.model.to(policy.device)
        return replace(policy, model=loaded.model.base_model)

    def _load(self, source: str, key: str) -> LoadedModel:
        loaded = load_model(source, self._config, key)
        if loaded.model.config.vocab_size != self._vocabulary:
            raise ConfigError(
                f"{key}: the vocabulary of {source!r} has {loaded.model.config.vocab_size} tokens, the "
                f"policy's {self._vocabulary}: use a model with the policy's tokenizer"
            )
        return loaded
