"""Data that an advantage estimator takes and returns."""

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig

Float64Array = NDArray[np.float64]


class Verdict(enum.StrEnum):
    """Result of comparing a group: a learning signal, or the reason for none."""

    TRAIN = "train"
    TOO_FEW_VALID = "too_few_valid"  # advantages are 0
    ZERO_VARIANCE = "zero_variance"  # advantages are 0


Mask = NDArray[np.uint8]
RowValues = tuple[Float64Array, ...]  # G times [R]
RowFlags = tuple[NDArray[np.bool_], ...]  # G times [R]
TokenValues = tuple[tuple[Float64Array, ...], ...]  # G times R times [T]

STD_EPSILON = 1e-6
ROUNDING = 1e-12  # relative
NO_REWARD = -1  # in place of a conversation number: the row's conversation has no reward


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns that one row trains."""

    ends: NDArray[np.int32]  # [K] end (exclusive) of each
    rewards: Float64Array  # [K]
    observations: NDArray[np.int64]  # [K] hash of task and observation; empty: not known
    first_turn: int = -1  # place in the episode's turn sequence; -1: the row is a sequence by itself
    turn_returns: Float64Array | None = None  # [K] return of each, where a message tree gives it


@dataclass(frozen=True, slots=True)
class Returns:
    """A group as an estimator sees it: one entry per member, in their order.

    Valid members have a policy token. A member's rows (R of them, often one) may be credited with
    other returns than the member itself: a row that ends in a discounted turn has less.
    `conversations` numbers the conversations of the member that have a reward, in the order in which
    they began.
    """

    rewards: Float64Array  # [G] episode returns; those of invalid members are never read
    is_valid: NDArray[np.bool_]  # [G]
    row_rewards: tuple[Float64Array, ...]  # G times [R]
    loss_masks: tuple[tuple[Mask, ...], ...]  # G times R times [T]
    turns: tuple[tuple[Turns, ...], ...] = ()  # G times R, for estimators that read turns
    greedy: int = -1  # the member played at temperature 0 as a baseline, if there is one
    token_rewards: TokenValues | None = None  # of single policy tokens, beyond those of turns
    values: TokenValues | None = None  # a critic's, of policy tokens
    conversations: tuple[NDArray[np.int64], ...] = ()  # G times [R], or `NO_REWARD`; empty: 0
    has_terminal_rewards: bool = False  # turn rewards account for all returns (`terminal_reward.py`)

    @property
    def row_conversations(self) -> tuple[NDArray[np.int64], ...]:
        """Conversation of every row, G times [R]."""
        if self.conversations:
            return self.conversations
        return tuple(np.zeros(len(rewards), np.int64) for rewards in self.row_rewards)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantage of every token; 0 where the loss mask is 0 and on invalid members."""

    per_token: TokenValues
    verdict: Verdict
    value_targets: TokenValues | None = None  # targets of a critic, where there is one
    # False for rows of conversations without a learning signal, whose advantages are 0; None: no row
    has_signal: RowFlags | None = None


def estimated(returns: Returns, config: LearnerConfig) -> Advantages:
    """Advantages of a group by the configured estimator; `TypeError` for any other result."""
    found = config.estimator(returns, config)
    if not isinstance(found, Advantages):
        raise TypeError(
            f"learner.adv_estimator {config.adv_estimator!r} returned {type(found).__name__}: let it "
            "return Advantages, for example those of compared(returns, baseline)"
        )
    return found


def broadcast(values: RowValues, returns: Returns) -> TokenValues:
    """Puts one value per row, G times [R], on each of the row's policy tokens."""
    return tuple(
        tuple(value * (mask != 0) for value, mask in zip(row_values, masks, strict=True))
        for row_values, masks in zip(values, returns.loss_masks, strict=True)
    )


def nothing(returns: Returns, verdict: Verdict) -> Advantages:
    """Makes advantages of 0 everywhere."""
    zeros = tuple(np.zeros(len(rewards)) for rewards in returns.row_rewards)
    return Advantages(broadcast(zeros, returns), verdict)


def are_equal(values: Float64Array, rounding: float = ROUNDING, size: float = 0.0) -> bool:
    """Tells whether values [n >= 1] differ by rounding only; `size`: of what they are sums of."""
    return bool(np.ptp(values) <= rounding * max(float(np.abs(values).max()), size))
