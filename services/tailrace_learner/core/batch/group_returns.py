"""Returns of a group for estimators, without the members and rows that cannot be used.

A member counts if its outcome is valid, its rewards are finite numbers up to `MAX_REWARD`, its rows are
whole (`core/batch/malformed.py`), and it has a sampled token. What cannot be used is counted by its
reason and leaves every statistic. So do rows of conversations without a reward.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.algorithms.advantages.base import NO_REWARD, Mask, Returns, Turns
from tailrace_learner.core.batch.malformed import COUNT, flaw_of
from tailrace_protos.base import as_float32, as_int32, as_int64, as_uint8
from tailrace_protos.trajectory import MAX_REWARD, TokenRow, Trajectory, TrajectoryGroup
from tailrace_protos.weights import ModelCard


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits of the model's input."""

    max_tokens: int = 0  # of one row; 0: any number
    vocabulary: int = 0  # token ids lie below; 0: any id


NO_LIMITS = RowLimits()


def group_returns(group: TrajectoryGroup, limits: RowLimits, counts: Counter[str]) -> Returns:
    """Returns and masks of all members; those that cannot be used are not valid and have no rows."""
    is_valid = [_is_usable(member, limits, counts) for member in group.members]
    members = _readable(group.members, is_valid)
    conversations = tuple(_conversations(member) for member in members)
    counts["num_unrewarded_rows"] = sum(
        int(np.count_nonzero(places == NO_REWARD)) for places in conversations
    )
    return Returns(
        rewards=np.array([member.reward for member in members], dtype=np.float64),
        is_valid=np.array(is_valid, dtype=np.bool_),
        row_rewards=tuple(np.array([row.reward for row in m.rows], np.float64) for m in members),
        loss_masks=tuple(_loss_masks(member) for member in members),
        turns=tuple(_row_turns(member) for member in members),
        greedy=next((index for index, member in enumerate(members) if member.is_greedy), -1),
        conversations=conversations,
    )


def num_unnamed_turns(returns: Returns) -> int:
    """Number of turns of the valid members whose observation is unknown."""
    rows = (row for member in np.flatnonzero(returns.is_valid) for row in returns.turns[member])
    return sum(len(row.rewards) for row in rows if len(row.observations) != len(row.rewards))


def limits_of(card: ModelCard) -> RowLimits:
    """Limits of the model of a card."""
    return RowLimits(card.context_tokens, vocabulary=card.vocabulary)


def is_overlong(row: TokenRow, limits: RowLimits) -> bool:
    """Tells whether the row has more tokens than the model reads."""
    return 0 < limits.max_tokens < len(as_int32(row.token_ids))


def _is_usable(member: Trajectory, limits: RowLimits, counts: Counter[str]) -> bool:
    if not member.outcome.is_valid:
        return False
    flaw = next((flaw for row in member.rows if (flaw := flaw_of(row, limits.vocabulary))), None)
    if flaw is not None:
        counts[COUNT] += 1
        counts[f"{COUNT}/{flaw}"] += 1
        return False
    if not _has_usable_rewards(member):
        counts["num_nonfinite_rewards"] += 1
        return False
    return any(as_uint8(row.loss_mask).any() for row in member.rows)


def _readable(members: Sequence[Trajectory], is_valid: Sequence[bool]) -> Sequence[Trajectory]:
    """Members, without rows where they are not valid: their arrays may be anything."""
    return [
        member if is_usable else msgspec.structs.replace(member, rows=())
        for member, is_usable in zip(members, is_valid, strict=True)
    ]


def _has_usable_rewards(member: Trajectory) -> bool:
    numbers = (member.reward, *(row.reward for row in member.rows))
    if not all(abs(number) <= MAX_REWARD for number in numbers):  # False for NaN too
        return False
    arrays = (array for row in member.rows for array in (row.turn_rewards, row.turn_returns))
    return all((np.abs(as_float32(array)) <= MAX_REWARD).all() for array in arrays)


def _conversations(member: Trajectory) -> NDArray[np.int64]:
    """Conversation of each row [R], numbered among those with a reward."""
    rewarded = sorted({row.conversation for row in member.rows if row.has_reward})
    places = {conversation: place for place, conversation in enumerate(rewarded)}
    return np.array([places.get(row.conversation, NO_REWARD) for row in member.rows], np.int64)


def _loss_masks(member: Trajectory) -> tuple[Mask, ...]:
    return tuple(as_uint8(row.loss_mask) for row in member.rows)


def _row_turns(member: Trajectory) -> tuple[Turns, ...]:
    return tuple(
        Turns(
            as_int32(row.turn_ends),
            as_float32(row.turn_rewards).astype(np.float64),
            as_int64(row.turn_hashes),
            row.first_turn,
            _turn_returns(row),
        )
        for row in member.rows
    )


def _turn_returns(row: TokenRow) -> NDArray[np.float64] | None:
    """Return of each turn along its message tree [K], if the row has one."""
    turn_returns = as_float32(row.turn_returns).astype(np.float64)
    return turn_returns if len(turn_returns) else None
