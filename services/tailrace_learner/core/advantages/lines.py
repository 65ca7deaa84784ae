"""Turns of a group in the order in which they happened, for estimators that look at single turns.

A line is a sequence of turns with its own return: an episode whose rows are stretches of it
(`Turns.first`), or a row that stands for itself. What a line's return says beyond the sum of its turn
rewards (a reward given at the end, a tree's discount) is added to the reward of its last turn, so
that turn rewards always sum to the return. Where rows beside an episode's line stand for themselves
(those of a sub-agent), what their turns earned is not the line's. Tokens after the last end belong to
the last turn; a row without turns is one turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.advantages.base import Float64Array, Mask, Returns, TokenValues, Turns

_NO_OBSERVATIONS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Line:
    """K turns of one valid member."""

    member: int
    rows: tuple[int, ...]  # of the member, in the order of their turns
    rewards: Float64Array  # [K], sum = the line's return
    observations: NDArray[np.int64]  # [K], or empty where any is not known
    row_starts: NDArray[np.int64]  # [R] first turn of each row
    turn_of_token: NDArray[np.int64]  # [N] turn of each policy token of all rows
    token_rewards: Float64Array  # [N] beyond those of turns
    values: Float64Array  # [N] a critic's; 0 without one

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Policy tokens of each turn [K]."""
        return np.bincount(self.turn_of_token, minlength=len(self.rewards))

    def rewards_of_tokens(self) -> Float64Array:
        """All rewards [N]: a turn's lies on its last policy token, or that of a turn before it."""
        result = self.token_rewards.copy()
        places = np.cumsum(self.num_tokens) - 1
        np.add.at(result, places[places >= 0], self.rewards[places >= 0])
        return result

    def returns_to_go(self, gamma: float) -> Float64Array:
        """G_k = r_k + gamma G_(k+1), [K]."""
        return discounted(self.rewards, gamma)


def discounted(rewards: Float64Array, factor: float) -> Float64Array:
    """x_t = r_t + factor x_(t+1), [n]."""
    ahead, result = 0.0, rewards.tolist()
    for t in range(len(result) - 1, -1, -1):
        ahead = result[t] = result[t] + factor * ahead
    return np.array(result)


def lines(returns: Returns) -> list[Line]:
    """All lines of the valid members that have policy tokens."""
    return [
        line
        for member in np.flatnonzero(returns.is_valid)
        for line in _lines_of(int(member), returns)
        if len(line.turn_of_token)
    ]


def _lines_of(member: int, returns: Returns) -> Iterator[Line]:
    turns = returns.turns[member]
    chained = sorted((i for i, t in enumerate(turns) if t.first >= 0), key=lambda i: turns[i].first)
    if chained:
        beside = sum(float(row.rewards.sum()) for row in turns if row.first < 0)
        yield _line(member, tuple(chained), float(returns.rewards[member]) - beside, returns)
    for index, row in enumerate(turns):
        if row.first < 0:
            yield _line(member, (index,), float(returns.row_rewards[member][index]), returns)


def _line(member: int, rows: tuple[int, ...], total: float, returns: Returns) -> Line:
    turns = [_at_least_one(returns.turns[member][row]) for row in rows]
    sizes = [len(row.rewards) for row in turns]
    starts = np.cumsum([0, *sizes[:-1]])
    rewards = np.concatenate([row.rewards for row in turns])
    rewards[-1] += total - rewards.sum()
    masks = [returns.loss_masks[member][row] for row in rows]
    owners = [start + _turn_of_token(r, m) for start, r, m in zip(starts, turns, masks, strict=True)]
    is_known = all(len(row.observations) == len(row.rewards) for row in turns)
    hashes = np.concatenate([row.observations for row in turns]) if is_known else _NO_OBSERVATIONS
    return Line(
        member,
        rows,
        rewards,
        hashes,
        starts,
        np.concatenate(owners),
        token_rewards=_policy_tokens(returns.token_rewards, member, rows, masks),
        values=_policy_tokens(returns.values, member, rows, masks),
    )


def _policy_tokens(
    values: TokenValues | None, member: int, rows: tuple[int, ...], masks: list[Mask]
) -> Float64Array:
    """Those of the policy tokens of all rows, [N]; zeros where there are none."""
    if values is None:
        return np.zeros(sum(np.count_nonzero(mask) for mask in masks))
    return np.concatenate(
        [values[member][row][mask != 0] for row, mask in zip(rows, masks, strict=True)]
    )


def _at_least_one(turns: Turns) -> Turns:
    if len(turns.rewards):
        return turns
    return Turns(np.array([0], np.int32), np.zeros(1), _NO_OBSERVATIONS, turns.first)


def _turn_of_token(turns: Turns, mask: Mask) -> NDArray[np.int64]:
    """The turn [n] of each policy token of one row."""
    owners = np.searchsorted(turns.ends, np.flatnonzero(mask), side="right")
    return np.minimum(owners, len(turns.ends) - 1)


def per_token(found: list[Line], values: list[Float64Array], returns: Returns) -> TokenValues:
    """Values of the policy tokens of each line, [N] each, put in their places."""
    result = [[np.zeros(len(mask)) for mask in masks] for masks in returns.loss_masks]
    for line, line_values in zip(found, values, strict=True):
        begin = 0
        for row in line.rows:
            places = np.flatnonzero(returns.loss_masks[line.member][row])
            result[line.member][row][places] = line_values[begin : begin + len(places)]
            begin += len(places)
    return tuple(tuple(rows) for rows in result)
