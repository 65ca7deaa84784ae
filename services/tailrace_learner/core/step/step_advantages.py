"""Advantages over a whole step, once all of its groups are there.

1. `starpo` over tags or the whole step: (R - mean) / (std + 1e-6) of the scope's valid episodes. A
   scope of one episode, or of equal returns, gives 0; its groups count as groups without a learning
   signal.
2. `advantage_clip` c: A becomes min(max(A, -c), c).
3. Whitening: (A - mean) / (std + 1e-6), mean and std (ddof 1) over all trained tokens of the step.
   Tokens that are not trained (inserted, stale, of invalid members) and those without a
   learning signal (by their group or their conversation) are left out and keep 0. Those of a scope
   of equal returns (1) take part, with 0. One token, or equal advantages everywhere, become 0.

Statistics are sums over rows in float64, so neither arrival nor packing changes them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.advantages.base import NO_REWARD, STD_EPSILON, Verdict, are_equal
from tailrace_learner.core.algorithms.advantages.comparison import comparable, joined
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow


def settled(advantages: NDArray[np.float64], config: LearnerConfig) -> NDArray[np.floating[Any]]:
    """Clips, and takes the precision of the loss, unless the whole step is needed first."""
    if config.waits_for_step:
        return advantages
    if config.advantage_clip:
        advantages = advantages.clip(-config.advantage_clip, config.advantage_clip)
    return advantages.astype(np.float32)


def finish_advantages(groups: Sequence[PreparedGroup], config: LearnerConfig) -> None:
    """Writes the final advantages into the rows of all groups of a step; can be repeated."""
    rows = [row for group in groups for row in group.rows]
    for row in rows:
        if row.unsettled is None:
            row.unsettled = row.advantages.astype(np.float64)
        row.advantages = row.unsettled
    if config.normalises_over_step:
        _normalise(groups, config)
    if config.advantage_clip:
        for row in rows:
            row.advantages = row.advantages.clip(-config.advantage_clip, config.advantage_clip)
    if config.whitens:
        _whiten(rows)
    for row in rows:
        row.advantages = row.advantages.astype(np.float32)


def _normalise(groups: Sequence[PreparedGroup], config: LearnerConfig) -> None:
    scopes: dict[str, list[PreparedGroup]] = {}
    for group in groups:
        scope = group.tag if config.reward_grouping == "tags" else ""
        scopes.setdefault(scope, []).append(group)
    for scoped in scopes.values():
        _normalise_scope(scoped, config)


def _normalise_scope(groups: Sequence[PreparedGroup], config: LearnerConfig) -> None:
    statistic = config.estimator.step_statistic
    assert statistic is not None
    comparison = joined([group.comparison for group in groups])
    known = {
        place: statistic(np.sort(comparison.returns[pool]), config)
        for place, pool in comparable(comparison.members, comparison.conversations).items()
    }
    for row in _compared_rows(row for group in groups for row in group.rows):
        mean, scale = known[row.conversation]
        row.advantages = (row.advantages - mean) / scale
    if all(np.isinf(scale) for _, scale in known.values()):
        verdict = Verdict.TOO_FEW_VALID if comparison.num_members < 2 else Verdict.ZERO_VARIANCE
        _count_as(verdict, groups)


def _count_as(verdict: Verdict, groups: Sequence[PreparedGroup]) -> None:
    """Counts groups of a scope without a learning signal by their new verdict."""
    for group in groups:
        if group.counts.get("num_groups_train"):
            group.counts.update({"num_groups_train": 0, f"num_groups_{verdict.value}": 1})


def _compared_rows(rows: Iterable[TrainingRow]) -> list[TrainingRow]:
    """Rows of conversations with a reward, in groups with a learning signal."""
    return [row for row in rows if row.conversation != NO_REWARD]


def _whiten(rows: Sequence[TrainingRow]) -> None:
    rows = _compared_rows(rows)
    if not rows:
        return
    pool = np.sort(np.concatenate([row.advantages for row in rows]))
    if len(pool) < 2 or are_equal(pool):
        mean, scale = 0.0, np.inf
    else:
        mean, scale = float(pool.mean()), float(pool.std(ddof=1)) + STD_EPSILON
    for row in rows:
        row.advantages = (row.advantages - mean) / scale
