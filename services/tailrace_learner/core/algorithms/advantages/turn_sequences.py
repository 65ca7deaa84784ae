"""Turn sequences: the turns of a group in order, for estimators that look at single turns.

A sequence is an episode whose rows are consecutive parts of it (`Turns.first_turn`), or a single row
(`terminal_reward.py` completes the rewards of its turns). The return of a turn is its reward and,
discounted by the estimator, the rewards after it. In a message tree the tree gives it
(`Turns.turn_returns`), discounted by `turn_discount`: the same as in rows of their own. Tokens after
the last turn's end belong to the last turn. A row without turns is one turn. Rows of conversations
without a reward are in no sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.algorithms.advantages.base import (
    NO_REWARD,
    Advantages,
    Float64Array,
    Mask,
    Returns,
    TokenValues,
    Turns,
    Verdict,
    nothing,
)
from tailrace_learner.core.algorithms.advantages.terminal_reward import (
    NO_OBSERVATIONS,
    sequence_rows,
    with_terminal_rewards,
)


@dataclass(frozen=True, slots=True)
class TurnSequence:
    """K turns of one valid member."""

    member: int
    conversation: int  # its place in the episode
    rows: tuple[int, ...]  # of the member, in the order of their turns
    rewards: Float64Array  # [K]
    turn_returns: Float64Array | None  # [K] returns of the turns, where a tree gives them
    observations: NDArray[np.int64]  # [K], or empty where any is not known
    row_starts: NDArray[np.int64]  # [R] first turn of each row
    turn_of_token: NDArray[np.int64]  # [N] turn of each policy token of all rows
    token_rewards: Float64Array  # [N] beyond those of turns
    values: Float64Array  # [N] a critic's; 0 without one

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of policy tokens of each turn [K]."""
        return np.bincount(self.turn_of_token, minlength=len(self.rewards))

    @property
    def size(self) -> float:
        """Size of the numbers that the returns are sums of, by which their rounding errors grow."""
        sums = self.rewards if self.turn_returns is None else self.turn_returns
        return float(np.abs(self.rewards).sum() + np.abs(sums).max(initial=0.0))

    def rewards_of_tokens(self, gamma: float, unit: Literal["token", "turn"] = "token") -> Float64Array:
        """Rewards of all tokens [N]: a turn's is on its last policy token, or on an earlier turn's.

        Where a tree gives the returns of turns, a turn's reward is such that it and the tokens after
        it, discounted by `gamma` per `unit`, add up to that return.
        """
        result, sizes = self.token_rewards.copy(), self.num_tokens
        places = np.cumsum(sizes) - 1
        if self.turn_returns is None:
            np.add.at(result, places[places >= 0], self.rewards[places >= 0])
            return result
        turn_returns, steps = self.turn_returns[sizes > 0], sizes[sizes > 0] if unit == "token" else 1
        result[places[sizes > 0]] += turn_returns - np.append((gamma**steps * turn_returns)[1:], 0.0)
        return result

    def returns_to_go(self, gamma: float) -> Float64Array:
        """G_k = r_k + gamma G_(k+1), or the tree's return of turn k, [K]."""
        return discounted(self.rewards, gamma) if self.turn_returns is None else self.turn_returns


def discounted(rewards: Float64Array, factor: float) -> Float64Array:
    """x_t = r_t + factor x_(t+1), [n]."""
    ahead, result = 0.0, rewards.tolist()
    for t in range(len(result) - 1, -1, -1):
        ahead = result[t] = result[t] + factor * ahead
    return np.array(result)


def turn_sequences(returns: Returns) -> list[TurnSequence]:
    """All sequences of the valid members that have policy tokens and a reward."""
    returns = with_terminal_rewards(returns)
    return [
        sequence
        for member in np.flatnonzero(returns.is_valid)
        for sequence in _sequences_of(int(member), returns)
        if len(sequence.turn_of_token) and sequence.conversation != NO_REWARD
    ]


def _sequences_of(member: int, returns: Returns) -> Iterator[TurnSequence]:
    rows = returns.turns[member]
    if chained := sequence_rows(rows):
        yield _sequence(member, chained, returns)
    for index, row in enumerate(rows):
        if row.first_turn < 0:
            yield _sequence(member, (index,), returns)


def _sequence(member: int, rows: tuple[int, ...], returns: Returns) -> TurnSequence:
    turns = [returns.turns[member][row] for row in rows]
    sizes = [len(row.rewards) for row in turns]
    starts = np.cumsum([0, *sizes[:-1]])
    masks = [returns.loss_masks[member][row] for row in rows]
    owners = [start + _turn_of_token(r, m) for start, r, m in zip(starts, turns, masks, strict=True)]
    is_known = all(len(row.observations) == len(row.rewards) for row in turns)
    hashes = np.concatenate([row.observations for row in turns]) if is_known else NO_OBSERVATIONS
    return TurnSequence(
        member,
        int(returns.row_conversations[member][rows[0]]),
        rows,
        np.concatenate([row.rewards for row in turns]),
        turns[0].turn_returns if turns[0].first_turn < 0 else None,
        hashes,
        starts,
        np.concatenate(owners),
        token_rewards=_policy_tokens(returns.token_rewards, member, rows, masks),
        values=_policy_tokens(returns.values, member, rows, masks),
    )


def _policy_tokens(
    values: TokenValues | None, member: int, rows: tuple[int, ...], masks: list[Mask]
) -> Float64Array:
    """Values of the policy tokens of all rows, [N]; zeros without values."""
    if values is None:
        return np.zeros(sum(np.count_nonzero(mask) for mask in masks))
    return np.concatenate(
        [values[member][row][mask != 0] for row, mask in zip(rows, masks, strict=True)]
    )


def _turn_of_token(turns: Turns, mask: Mask) -> NDArray[np.int64]:
    """Turn [n] of each policy token of one row."""
    owners = np.searchsorted(turns.ends, np.flatnonzero(mask), side="right")
    return np.minimum(owners, len(turns.ends) - 1)


def per_token(found: list[TurnSequence], values: list[Float64Array], returns: Returns) -> TokenValues:
    """Puts values of the policy tokens of each sequence, [N] each, at their tokens."""
    result = [[np.zeros(len(mask)) for mask in masks] for masks in returns.loss_masks]
    for sequence, sequence_values in zip(found, values, strict=True):
        begin = 0
        for row in sequence.rows:
            places = np.flatnonzero(returns.loss_masks[sequence.member][row])
            result[sequence.member][row][places] = sequence_values[begin : begin + len(places)]
            begin += len(places)
    return tuple(tuple(rows) for rows in result)


def of_sequences(returns: Returns, found: list[TurnSequence], values: list[Float64Array]) -> Advantages:
    """Advantages [N] of compared sequences; a conversation whose own are all 0 has no signal."""
    teaching = {each.conversation for each, part in zip(found, values, strict=True) if part.any()}
    if not teaching:
        return nothing(returns, Verdict.ZERO_VARIANCE)
    flags = tuple(np.isin(places, list(teaching)) for places in returns.row_conversations)
    return Advantages(per_token(found, values, returns), Verdict.TRAIN, has_signal=flags)
