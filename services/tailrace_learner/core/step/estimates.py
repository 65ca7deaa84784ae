"""Advantages that need models: values of every policy token, or divergences from a reference.

Models read all policy tokens of valid members, trained or not, since a token's advantage depends on
those after it. Tokens of rows longer than the model reads are skipped like tokens of the environment:
the reward of their turns belongs to the turn before. The divergence in the reward is that of the
policy that sampled, r_t = -beta KL_t with its log-probabilities as the engine reported them. Groups
are estimated as they arrive, by the weights of the step's start. Over several ranks every rank
estimates all groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.advantages.base import (
    NO_REWARD,
    Advantages,
    Mask,
    TokenValues,
    estimated,
)
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS
from tailrace_learner.core.algorithms.ratios import BOUND
from tailrace_learner.core.batch.rows import PreparedGroup, Source, TrainingRow, Unestimated
from tailrace_learner.core.model.policy import StartWeights
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.step_advantages import settled

OfRow = Callable[[TrainingRow], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Roles:
    """Models beside the policy, where the configuration asks for them."""

    reference: Reference | None = None
    critic: CriticTrainer | None = None


NO_ROLES = Roles()


class Estimates:
    """Completes groups; costs nothing where their advantages are known."""

    def __init__(self, roles: Roles, policy_start: StartWeights, config: LearnerConfig) -> None:
        self._roles = roles
        self._policy_start = policy_start
        self._config = config

    def complete(self, groups: Sequence[PreparedGroup], kl_coef: float) -> None:
        """Writes advantages, values and their targets into the rows of groups that lack them."""
        needy = [group.unestimated for group in groups if group.unestimated is not None]
        wholes = [s.whole for each in needy for s in each.sources if s.whole is not None]
        if self._config.rewards_divergence:
            assert self._roles.reference is not None
            self._roles.reference.fill(wholes)
        if self._roles.critic is not None:
            self._roles.critic.fill(wholes, self._policy_start)
        for each in needy:
            self._finish(each, kl_coef)

    def _finish(self, group: Unestimated, kl_coef: float) -> None:
        returns = replace(group.returns, loss_masks=_asked(group))
        if self._roles.critic is not None:
            returns = replace(returns, values=_placed(group, _values))
        if self._config.rewards_divergence:
            _keep_advantages(group, estimated(returns, self._config))
            costs = _placed(group, lambda row: -kl_coef * self._divergence(row))
            returns = replace(returns, token_rewards=costs)
        advantages = estimated(returns, self._config)
        for source in group.sources:
            if source.trained is not None and source.whole is not None:
                self._write(source, source.trained, source.whole, advantages)

    def _write(
        self, source: Source, trained: TrainingRow, whole: TrainingRow, advantages: Advantages
    ) -> None:
        per_token = advantages.per_token[source.member][source.place]
        trained.advantages = settled(per_token[trained.targets], self._config)
        places = np.searchsorted(whole.targets, trained.targets)
        if whole.ref_logprobs is not None:
            trained.ref_logprobs = whole.ref_logprobs[places]
        if whole.values is not None and advantages.value_targets is not None:
            targets = advantages.value_targets[source.member][source.place]
            trained.values = whole.values[places]
            trained.value_targets = targets[trained.targets].astype(np.float32)
            if trained.conversation == NO_REWARD:  # there is no target
                trained.value_targets = trained.values

    def _divergence(self, row: TrainingRow) -> NDArray[np.float64]:
        """Divergence at every policy token [M]; 0 where the reported log-probability is impossible."""
        assert row.ref_logprobs is not None
        estimate = KL_ESTIMATORS[self._config.kl_estimator]
        inference_logprobs, ref_logprobs = (
            torch.from_numpy(part).double() for part in (row.inference_logprobs, row.ref_logprobs)
        )
        found: NDArray[np.float64] = estimate(inference_logprobs, ref_logprobs).numpy()
        is_known = np.isfinite(row.inference_logprobs)
        is_known &= row.ref_logprobs - row.inference_logprobs <= BOUND
        return np.where(is_known, found, 0.0)


def _values(row: TrainingRow) -> NDArray[Any]:
    assert row.values is not None
    return row.values


def _keep_advantages(group: Unestimated, advantages: Advantages) -> None:
    """Writes what the advantages are without the divergence into the rows."""
    for source in group.sources:
        if source.trained is not None:
            per_token = advantages.per_token[source.member][source.place]
            source.trained.reward_advantages = per_token[source.trained.targets]


def _asked(group: Unestimated) -> tuple[tuple[Mask, ...], ...]:
    """Loss masks with only those policy tokens that models read."""
    masks = tuple(
        tuple(np.zeros(len(mask), np.uint8) for mask in rows) for rows in group.returns.loss_masks
    )
    for source in group.sources:
        if source.whole is not None:
            masks[source.member][source.place][source.whole.targets] = 1
    return masks


def _placed(group: Unestimated, of: OfRow) -> TokenValues:
    """Values of policy tokens at their places; 0 elsewhere."""
    result = tuple(tuple(np.zeros(len(mask)) for mask in masks) for masks in group.returns.loss_masks)
    for source in group.sources:
        if source.whole is not None:
            result[source.member][source.place][source.whole.targets] = of(source.whole)
    return result
