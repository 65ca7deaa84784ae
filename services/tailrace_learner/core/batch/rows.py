"""Rows and groups of a step.

Invariant: a row ends before its last trained token, since later tokens have no effect on the
gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.algorithms.advantages.base import Returns
from tailrace_learner.core.algorithms.advantages.comparison import NO_COMPARISON, ComparisonSet
from tailrace_protos.generation import TokenSpan


@dataclass(slots=True)
class TrainingRow:
    """One row to train: a prefix of an episode's row and the tokens in it that are trained."""

    row_id: str
    token_ids: NDArray[np.integer[Any]]  # [T] inputs; the last trained token itself is no input
    targets: NDArray[np.int64]  # [M] positions of trained tokens, each >= 1
    target_ids: NDArray[np.integer[Any]]  # [M]
    inference_logprobs: NDArray[np.float32]  # [M]
    advantages: NDArray[np.floating[Any]]  # [M]; float32 once the step needs nothing more to know
    staleness: NDArray[np.int64]  # [M] optimizer steps
    is_current: NDArray[np.bool_]  # [M] sampled by the very weights that the step starts with
    proximal_logprobs: NDArray[np.float32] | None = None  # [M] once computed
    turns: NDArray[np.int64] | None = None  # [M] ascending; only for losses that look at turns
    is_picked: NDArray[np.float32] | None = None  # [M] 1 where the loss's selection picked the token
    ref_logprobs: NDArray[np.float32] | None = None  # [M] of the reference model, once computed
    values: NDArray[np.float32] | None = None  # [M] of the critic at the step's start, once computed
    value_targets: NDArray[np.float32] | None = None  # [M] what the critic is trained to say
    spans: tuple[TokenSpan, ...] = ()  # of all targets, or empty: not known
    unsettled: NDArray[np.float64] | None = None  # [M] advantages before the whole step was compared
    conversation: int = 0  # its place in the episode; `NO_REWARD`: all advantages are 0, not compared
    reward_advantages: NDArray[np.float64] | None = None  # [M] without the rewards' divergence
    is_own: NDArray[np.bool_] | None = None  # [M] by the learner's weights of `staleness` steps ago
    is_clamped: NDArray[np.bool_] | None = None  # [M] a log-ratio was beyond its bound in this step


class Source(NamedTuple):
    """A row of a group."""

    member: int
    place: int  # among the member's rows
    whole: TrainingRow | None  # with all sampled tokens as targets, where a model must read them
    trained: TrainingRow | None


@dataclass(frozen=True, slots=True)
class Unestimated:
    """Data that a group's advantages need once values or divergences are known."""

    returns: Returns
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """Contribution of a group to a step."""

    group_id: str
    group_index: int
    rows: tuple[TrainingRow, ...]
    drop_reason: str  # empty unless the group must be given back
    rewards: tuple[float, ...]  # of valid members
    successes: tuple[float, ...]  # of the valid members
    counts: dict[str, int] = field(default_factory=dict)
    tag: str = ""  # of the task
    # Of trained members, with shaped returns, where the whole step is compared.
    comparison: ComparisonSet = NO_COMPARISON
    unestimated: Unestimated | None = None  # given until the rows have their advantages
    untrained: tuple[int, ...] = ()  # tokens of each row that counts in the divisor without a gradient


def demonstration_row(
    row_id: str, token_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8]
) -> TrainingRow | None:
    """Makes a row for the `sft` loss; None when its mask is empty."""
    targets = np.flatnonzero(loss_mask[1:] != 0) + 1
    if not len(targets):
        return None
    zeros = np.zeros(len(targets), dtype=np.float32)
    return TrainingRow(
        row_id=row_id,
        token_ids=token_ids[: targets[-1]],
        targets=targets,
        target_ids=token_ids[targets],
        inference_logprobs=zeros,
        advantages=zeros,
        staleness=np.zeros(len(targets), dtype=np.int64),
        is_current=np.zeros(len(targets), dtype=np.bool_),
        proximal_logprobs=zeros,
    )


def gathered(rows: Sequence[TrainingRow], of: Callable[[TrainingRow], NDArray[Any] | None]) -> Tensor:
    """Values of the targets of all rows [M], on the host; rows without the value are skipped."""
    parts = [part for row in rows if (part := of(row)) is not None]
    return torch.from_numpy(np.concatenate(parts))
