"""All that turns earned, also what their episode was given at its end.

A line is a sequence of turns with its own return: an episode whose rows are stretches of it
(`Turns.first`), or a row that stands for itself. What its return says beyond the sum of its turn
rewards (a reward given at the end) is added to the reward of its last turn. Where rows beside an
episode's line stand for themselves (those of a sub-agent), what their turns earned is not the line's.

Rows of a message tree know what each of their turns is worth (`Turns.worth`): its reward and its share
of what followed it in the tree, other rows included. There nothing is missing but what was given to the
whole row: by that its return exceeds that of the first turn that it trains, and every turn of it is
worth so much more.
"""

from __future__ import annotations

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
    """The same returns with turns that account for all of them."""
    if returns.has_terminal_rewards:
        return returns
    turns = tuple(_with_terminal_rewards(member, returns) for member in range(len(returns.turns)))
    return replace(returns, turns=turns, has_terminal_rewards=True)


def reduced(returns: Returns, amounts: RowValues) -> Returns:
    """Every row's return, and what its turns make of it, less an amount, G times [R].

    Turns that follow each other lose it at the end of their line. Members' returns stay.
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
    """Returns and turns' rewards, completed before, within plus or minus `bound`."""
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
    """The rows that are stretches of the episode's line, in the order of their turns."""
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
    """The first turn with a policy token, 0 without any."""
    first = int(np.argmax(mask != 0)) if mask.any() else 0
    return min(int(np.searchsorted(row.ends, first, side="right")), len(row.ends) - 1)


def _at_least_one(row: Turns) -> Turns:
    if len(row.rewards):
        return row
    return Turns(np.array([0], np.int32), np.zeros(1), NO_OBSERVATIONS, row.first_turn)
