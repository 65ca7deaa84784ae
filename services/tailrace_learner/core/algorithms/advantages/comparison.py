"""Comparison sets and baselines: which conversations of a group are compared with each other.

An episode is one conversation, or several: those of a main agent and its sub-agents are message trees
of their own, with returns of their own. Only conversations that have a reward take part, and only
they are numbered. A conversation is compared with those of the same number in the other valid members
of the group. If no other member has a conversation of that number, it is compared with all of the
group. Rows of a conversation without a reward have advantage 0 and are in no statistic, because the
reward of another agent does not measure them.

The return of a conversation is that of its member where no member has two conversations. Otherwise it
is the return credited to its first row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.algorithms.advantages.base import (
    NO_REWARD,
    Advantages,
    Float64Array,
    Returns,
    RowFlags,
    RowValues,
    Verdict,
    are_equal,
    broadcast,
    nothing,
)


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """n conversations that are compared with each other."""

    members: NDArray[np.int64]  # [n]
    conversations: NDArray[np.int64]  # [n] place of each in its episode
    returns: Float64Array  # [n]
    num_tokens: NDArray[np.int64]  # [n] policy tokens of all of its rows

    @property
    def num_members(self) -> int:
        """Number of episodes that they come from."""
        return len(np.unique(self.members))

    def chosen(self, chosen: NDArray[np.bool_]) -> "ComparisonSet":
        """The part of the set that the flags [n] choose."""
        return ComparisonSet(
            self.members[chosen],
            self.conversations[chosen],
            self.returns[chosen],
            self.num_tokens[chosen],
        )


NO_COMPARISON = ComparisonSet(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64)
)

# Baseline of each of n conversations, and the scale of all. An infinite scale stands for a comparison
# without a learning signal.
Statistic = Callable[[ComparisonSet], tuple[Float64Array | float, float]]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Baseline and scale of every row; an infinite scale: no learning signal."""

    verdict: Verdict
    baselines: RowValues
    scales: RowValues

    @property
    def has_signal(self) -> RowFlags:
        """False for rows without a learning signal."""
        return tuple(np.isfinite(scales) for scales in self.scales)


def comparison_set(returns: Returns) -> ComparisonSet:
    """All conversations of the valid members that have a reward, in their order."""
    places = returns.row_conversations
    pairs = [
        (member, conversation)
        for member in np.flatnonzero(returns.is_valid).tolist()
        for conversation in np.unique(places[member]).tolist()
        if conversation != NO_REWARD
    ]
    has_one_each = len({member for member, _ in pairs}) == len(pairs)
    worths, sizes = [], []
    for member, conversation in pairs:
        rows = np.flatnonzero(places[member] == conversation)
        credited = returns.row_rewards[member][rows[0]]
        worths.append(returns.rewards[member] if has_one_each else credited)
        sizes.append(sum(np.count_nonzero(returns.loss_masks[member][row]) for row in rows))
    members, conversations = np.array(pairs, np.int64).reshape(-1, 2).T
    return ComparisonSet(
        members, conversations, np.array(worths, np.float64), np.array(sizes, np.int64)
    )


def joined(groups: Sequence[ComparisonSet]) -> ComparisonSet:
    """Joins the sets of several groups; their members are numbered one group after the other."""
    parts, begin = [NO_COMPARISON], 0
    for comparison in groups:
        parts.append(replace(comparison, members=comparison.members + begin))
        begin += int(comparison.members.max(initial=-1)) + 1
    return ComparisonSet(
        np.concatenate([comparison.members for comparison in parts]),
        np.concatenate([comparison.conversations for comparison in parts]),
        np.concatenate([comparison.returns for comparison in parts]),
        np.concatenate([comparison.num_tokens for comparison in parts]),
    )


def comparable(
    members: NDArray[np.int64], conversations: NDArray[np.int64]
) -> Mapping[int, NDArray[np.bool_]]:
    """For every conversation number, flags [n] of the conversations that it is compared with."""
    found = {}
    for place in np.unique(conversations).tolist():
        same = conversations == place
        is_shared = len(np.unique(members[same])) > 1
        found[place] = same if is_shared else np.ones(len(members), np.bool_)
    return found


def baselines_of(returns: Returns, statistic: Statistic) -> Baselines:
    """Asks `statistic` for the baselines [n] and the scale of conversations whose returns differ."""
    comparison = comparison_set(returns)
    baselines = tuple(np.zeros(len(rewards)) for rewards in returns.row_rewards)
    scales = tuple(np.full(len(rewards), np.inf) for rewards in returns.row_rewards)
    if comparison.num_members < 2:
        return Baselines(Verdict.TOO_FEW_VALID, baselines, scales)
    for place, pool in comparable(comparison.members, comparison.conversations).items():
        if are_equal(comparison.returns[pool]):
            continue
        compared_with = comparison.chosen(pool)
        baseline, scale = statistic(compared_with)
        of_each = np.broadcast_to(baseline, len(compared_with.members))
        for index in np.flatnonzero(compared_with.conversations == place):
            member = compared_with.members[index]
            rows = returns.row_conversations[member] == place
            baselines[member][rows], scales[member][rows] = of_each[index], scale
    teaches = any(np.isfinite(values).any() for values in scales)
    return Baselines(Verdict.TRAIN if teaches else Verdict.ZERO_VARIANCE, baselines, scales)


def compared(returns: Returns, statistic: Statistic) -> Advantages:
    """Computes (R_ij - baseline) / scale on the rows of valid members."""
    found = baselines_of(returns, statistic)
    if found.verdict is not Verdict.TRAIN:
        return nothing(returns, found.verdict)
    per_token = broadcast(_scaled(returns, found), returns)
    return Advantages(per_token, Verdict.TRAIN, has_signal=found.has_signal)


def uncompared(returns: Returns) -> Advantages:
    """Puts R_ij on the rows of valid members, without a comparison."""
    values = tuple(
        np.where(conversations != NO_REWARD, rewards, 0.0) if is_valid else np.zeros(len(rewards))
        for rewards, conversations, is_valid in zip(
            returns.row_rewards, returns.row_conversations, returns.is_valid, strict=True
        )
    )
    return Advantages(broadcast(values, returns), Verdict.TRAIN)


def _scaled(returns: Returns, found: Baselines) -> RowValues:
    return tuple(
        (rewards - baselines) / scales if is_valid else np.zeros(len(rewards))
        for rewards, baselines, scales, is_valid in zip(
            returns.row_rewards, found.baselines, found.scales, returns.is_valid, strict=True
        )
    )
