"""Terminal rewards: turn rewards that account for the whole return of their sequence.

A sequence of turns has a return of its own: an episode whose rows are consecutive parts of it
(`Turns.first_turn`), or a single row. A return may exceed the sum of its turn rewards, by a reward at
the end of the episode. This difference is added to the reward of the last turn. Rows that stand alone
beside an episode's sequence (those of a sub-agent) keep what their turns earned.

Rows of a message tree know the return of each of their turns (`Turns.turn_returns`): its reward and
its share of what followed it in the tree, other rows included. There only a reward of the whole row
is missing: it is the difference between the row's return and the return of the first turn that the
row trains. It is added to every turn of the row.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailrace_learner.core.algorithms.advantages.base import (
    Float64Array,
    Mask,
    Returns,
    RowValues,
    Turns,
)

NO_OBSERVATIONS = np.zeros(0, np.int64)


def with_terminal_rewards(returns: Returns) -> Returns:
    """Returns whose turn rewards account for all of them."""
    if returns.has_terminal_rewards:
        return returns
    turns = tuple(_with_terminal_rewards(member, returns) for member in range(len(returns.turns)))
    return replace(returns, turns=turns, has_terminal_rewards=True)


def reduced(returns: Returns, amounts: RowValues) -> Returns:
    """Subtracts an amount from every row's return and from its turns, G times [R].

    Turns that follow each other lose it at the end of their sequence. The members' returns stay.
    """
    returns = with_terminal_rewards(returns)
    return replace(
        returns,
        row_rewards=tuple(
            rewards - lost for rewards, lost in zip(returns.row_rewards, amounts, strict=True)
        ),
        turns=tuple(_reduced(rows, lost) for rows, lost in zip(returns.turns, amounts, strict=False)),
    )


def clipped(returns: Returns, bound: float) -> Returns:
    """Clips returns and turn rewards, terminal rewards included, to plus or minus `bound`."""
    returns = with_terminal_rewards(returns)

    def clip(values: Float64Array) -> Float64Array:
        return np.clip(values, -bound, bound)

    def clip_turns(row: Turns) -> Turns:
        turn_returns = None if row.turn_returns is None else clip(row.turn_returns)
        return replace(row, rewards=clip(row.rewards), turn_returns=turn_returns)

    return replace(
        returns,
        rewards=clip(returns.rewards),
        row_rewards=tuple(clip(rewards) for rewards in returns.row_rewards),
        turns=tuple(tuple(clip_turns(row) for row in rows) for rows in returns.turns),
    )


def sequence_rows(rows: Sequence[Turns]) -> tuple[int, ...]:
    """Rows that are parts of the episode's sequence, in the order of their turns."""
    chained = (index for index, row in enumerate(rows) if row.first_turn >= 0)
    return tuple(sorted(chained, key=lambda index: rows[index].first_turn))


def _with_terminal_rewards(member: int, returns: Returns) -> tuple[Turns, ...]:
    rows = [_at_least_one(row) for row in returns.turns[member]]
    if not returns.is_valid[member]:
        return tuple(rows)
    given = sum(float(row.rewards.sum()) for row in rows)
    chained = sequence_rows(rows)
    for index, (row, total) in enumerate(zip(rows, returns.row_rewards[member], strict=True)):
        if row.first_turn >= 0:
            continue
        if row.turn_returns is None:
            rows[index] = _with_more(row, float(total - row.rewards.sum()))
        else:
            first = _first_trained(row, returns.loss_masks[member][index])
            rows[index] = replace(
                row, turn_returns=row.turn_returns + float(total - row.turn_returns[first])
            )
    if chained:
        rows[chained[-1]] = _with_more(rows[chained[-1]], float(returns.rewards[member]) - given)
    return tuple(rows)


def _reduced(rows: tuple[Turns, ...], amounts: Float64Array) -> tuple[Turns, ...]:
    last = sequence_rows(rows)[-1:]
    return tuple(
        row if row.first_turn >= 0 and index not in last else _with_more(row, -float(lost))
        for index, (row, lost) in enumerate(zip(rows, amounts, strict=True))
    )


def _with_more(row: Turns, amount: float) -> Turns:
    rewards = row.rewards.copy()
    rewards[-1] += amount
    return replace(
        row,
        rewards=rewards,
        turn_returns=None if row.turn_returns is None else row.turn_returns + amount,
    )


def _first_trained(row: Turns, mask: Mask) -> int:
    """First turn with a policy token; 0 without any."""
    first = int(np.argmax(mask != 0)) if mask.any() else 0
    return min(int(np.searchsorted(row.ends, first, side="right")), len(row.ends) - 1)


def _at_least_one(row: Turns) -> Turns:
    if len(row.rewards):
        return row
    return Turns(np.array([0], np.int32), np.zeros(1), NO_OBSERVATIONS, row.first_turn)
