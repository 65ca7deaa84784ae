"""Metrics of a step. `METRICS` names the built-in ones, which are always on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tailrace_learner.config_registry import METRICS, Metric
from tailrace_learner.core.algorithms.advantages.base import are_equal

if TYPE_CHECKING:
    from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow

Metrics = dict[str, float | None]
"""Numbers by name; None where a number is unknown."""

_COUNTED = (
    "num_invalid_episodes",
    "num_malformed_episodes",
    "num_nonfinite_rewards",
    "num_nonfinite_tokens",
    "num_masked_episodes",
    "num_overlong_rows",
    "num_unrewarded_rows",
    "num_quarantined_tokens",
    "num_stale_tokens",
    "num_groups_train",
    "num_groups_zero_variance",
    "num_groups_too_few_valid",
)


class StepData(NamedTuple):
    """Groups and rows of one finished step, from all ranks."""

    step: int  # that this one is; the first is 1
    groups: Sequence[PreparedGroup]  # their rewards, successes, counts and tags
    rows: Sequence[TrainingRow]  # trained rows: tokens, advantages, staleness


def mean(values: Sequence[float]) -> float | None:
    """Mean of the values; None if there are none."""
    return float(np.mean(values)) if values else None


def data_metrics(step: StepData, config: Any) -> Metrics:
    """Compute all built-in metrics of the groups and rows of a step."""
    numbers: Metrics = {}
    for metric in METRICS.values():
        numbers |= metric.fn(step, config)
    return numbers


def returns(step: StepData, config: Any) -> Metrics:
    """Mean and sample deviation of the returns of valid members, and their success rate."""
    return _returns_of(step.groups)


def tags(step: StepData, config: Any) -> Metrics:
    """`tag/<tag>/<name>` for every name of `returns`, and `num_groups`."""
    by_tag: dict[str, list[PreparedGroup]] = {}
    for group in step.groups:
        by_tag.setdefault(group.tag, []).append(group)
    numbers: Metrics = {}
    for tag, groups in sorted(by_tag.items()):
        numbers |= {f"tag/{tag}/{name}": value for name, value in _returns_of(groups).items()}
        numbers[f"tag/{tag}/num_groups"] = float(len(groups))
    return numbers


def counts(step: StepData, config: Any) -> Metrics:
    """Number of groups, and of episodes, rows and tokens that are not trained."""
    total: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
    for group in step.groups:
        total.update(group.counts)
    numbers: Metrics = {name: float(count) for name, count in total.items()}
    return numbers | {"num_groups": float(len(step.groups))}


def tokens(step: StepData, config: Any) -> Metrics:
    """Number of the trained tokens, also of those with a signal, and their staleness in steps."""
    staleness = np.concatenate([row.staleness for row in step.rows]) if step.rows else np.zeros(0)
    return {
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": float(staleness.max()) if len(staleness) else None,
        "num_trained_tokens": float(len(staleness)),
        "num_signal_tokens": float(num_signal_tokens(step.rows, config)),
        "num_row_tokens": float(sum(len(row.token_ids) for row in step.rows)),
    }


def num_signal_tokens(rows: Sequence[TrainingRow], config: Any) -> int:
    """Number of trained tokens with a learning signal: an advantage that is not 0.

    A divergence from the run's own start only holds the policy where it began: it is no signal, in the
    loss or in the reward. That from another model (`reference.pretrain`) is one. With equal rewards
    whitening would leave nothing but the divergence.
    """
    if not rows:
        return 0
    if config.policy_loss.ignores_advantages or _has_teacher(config):
        return sum(len(row.targets) for row in rows)
    if not config.rewards_divergence:
        return sum(int(np.count_nonzero(row.advantages)) for row in rows)
    advantages = np.concatenate([row.reward_advantages for row in rows])
    return 0 if config.whitens and are_equal(advantages) else int(np.count_nonzero(advantages))


def _has_teacher(config: Any) -> bool:
    """Tells whether the divergence is from another model than the run's own start."""
    return config.needs_reference and config.reference is not None and bool(config.reference.pretrain)


RETURNS, TAGS, COUNTS, TOKENS = Metric(returns), Metric(tags), Metric(counts), Metric(tokens)


def _returns_of(groups: Iterable[PreparedGroup]) -> Metrics:
    groups = list(groups)
    rewards = [reward for group in groups for reward in group.rewards]
    successes = [success for group in groups for success in group.successes]
    return {
        "reward_mean": mean(rewards),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "success_rate": mean(successes),
    }
