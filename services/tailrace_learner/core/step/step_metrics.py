"""Metrics of the groups and rows that a step trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow

Metrics = dict[str, float | None]

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


def data_metrics(groups: Sequence[PreparedGroup], rows: Sequence[TrainingRow]) -> Metrics:
    """Counts, returns and ages of the step's groups."""
    staleness = np.concatenate([row.staleness for row in rows]) if rows else np.zeros(0)
    return {
        **_returns(groups),
        **_returns_by_tag(groups),
        **_count_groups(groups),
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": float(staleness.max()) if len(staleness) else None,
        "num_groups": float(len(groups)),
        "num_trained_tokens": float(len(staleness)),
        "num_row_tokens": float(sum(len(row.token_ids) for row in rows)),
    }


def mean(values: Sequence[float]) -> float | None:
    """Mean of the numbers; None without any."""
    return float(np.mean(values)) if values else None


def _count_groups(groups: Sequence[PreparedGroup]) -> Metrics:
    counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
    for group in groups:
        counts.update(group.counts)
    return {name: float(count) for name, count in counts.items()}


def _returns(groups: Sequence[PreparedGroup]) -> Metrics:
    """Mean and sample deviation of the returns of valid members, and their success rate."""
    rewards = [reward for group in groups for reward in group.rewards]
    successes = [success for group in groups for success in group.successes]
    return {
        "reward_mean": mean(rewards),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "success_rate": mean(successes),
    }


def _returns_by_tag(groups: Sequence[PreparedGroup]) -> Metrics:
    """The same for the tasks of each tag, with the number of its groups."""
    by_tag: dict[str, list[PreparedGroup]] = {}
    for group in groups:
        by_tag.setdefault(group.tag, []).append(group)
    metrics: Metrics = {}
    for tag, members in sorted(by_tag.items()):
        metrics |= {f"tag/{tag}/{name}": value for name, value in _returns(members).items()}
        metrics[f"tag/{tag}/num_groups"] = float(len(members))
    return metrics
