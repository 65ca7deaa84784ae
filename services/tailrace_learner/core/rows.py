"""Groups into rows: which tokens are trained, with which advantage, how stale they are.

Invariants: every trained token is a sampled one (loss mask 1) of a valid member, its log-probability is
finite, and it is at most `max_staleness` steps old. A row ends before its last trained token: what
comes after it has no effect on what is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages import ESTIMATORS, Advantages, Returns, Turns, Verdict
from tailrace_learner.core.advantages.shaping import shaped
from tailrace_learner.core.lineage import Ancestry
from tailrace_protos.base import as_float32, as_int32, as_int64, as_uint8
from tailrace_protos.trajectory import TokenRow, Trajectory, TrajectoryGroup

TURN_LOSSES = frozenset({"segment"})


@dataclass(slots=True)
class Row:
    """One row to train: a prefix of an episode's row and the tokens in it that are trained."""

    row_id: str
    token_ids: NDArray[np.int64]  # [T] inputs; the last trained token itself is no input
    targets: NDArray[np.int64]  # [M] positions of trained tokens, each >= 1
    target_ids: NDArray[np.int64]  # [M]
    log_mu: NDArray[np.float32]  # [M]
    advantages: NDArray[np.floating[Any]]  # [M]; float32 once the step needs nothing more to know
    staleness: NDArray[np.int64]  # [M] optimizer steps
    is_current: NDArray[np.bool_]  # [M] sampled by the very weights that the step starts with
    log_pi_old: NDArray[np.float32] | None = None  # [M] once computed
    turns: NDArray[np.int64] | None = None  # [M] ascending; only for losses that look at turns
    is_picked: NDArray[np.float32] | None = None  # [M] 1 where the loss's selection picked the token


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """What a group contributes to a step."""

    group_id: str
    group_index: int
    rows: tuple[Row, ...]
    drop_reason: str  # empty unless the group must be given back
    rewards: tuple[float, ...]  # of valid members
    successes: tuple[float, ...]  # of valid members that report it
    counts: dict[str, int] = field(default_factory=dict)
    tag: str = ""  # of the task
    returns: tuple[float, ...] = ()  # rewards as advantages see them: clipped, less length penalty


@dataclass(frozen=True, slots=True)
class RowBuilder:
    """Prepares groups for one step of one lineage."""

    config: LearnerConfig
    max_staleness: int
    ancestry: Ancestry

    def unknown_versions(self, group: TrajectoryGroup, book: Mapping[int, tuple[str, int]]) -> set[int]:
        """Versions of the group's tokens that `book` does not list (yet)."""
        arrays = [as_int32(row.policy_versions) for member in group.members for row in member.rows]
        versions = {version for array in arrays for version in np.unique(array).tolist()}
        return {version for version in versions if version >= 0 and version not in book}

    def prepare(
        self, group: TrajectoryGroup, step: int, book: Mapping[int, tuple[str, int]]
    ) -> PreparedGroup:
        """Advantages and masks of one group for a learner that has done `step` steps."""
        returns = shaped(_returns(group), self.config)
        advantages = ESTIMATORS[self.config.adv_estimator](returns, self.config)
        played = [index for index in np.flatnonzero(returns.is_valid) if index != returns.greedy]
        kept = [group.members[index] for index in played]
        counts = {
            "num_invalid_episodes": len(group.members) - int(returns.is_valid.sum()),
            f"num_groups_{advantages.verdict.value}": 1,
        }
        rows: tuple[Row, ...] = ()
        if advantages.verdict is Verdict.TRAIN:
            pairs = _valid_rows(group, returns, advantages)
            found = (self._row(*pair, step, book, counts) for pair in pairs)
            rows = tuple(row for row in found if row is not None)
        return PreparedGroup(
            group_id=group.group_id,
            group_index=group.group_index,
            rows=rows,
            drop_reason=self._drop_reason(advantages.verdict, counts),
            rewards=tuple(member.reward for member in kept),
            successes=tuple(m.metrics["success"] for m in kept if "success" in m.metrics),
            counts=counts,
            tag=group.members[0].task.env_name,
            returns=tuple(returns.rewards[played].tolist()),
        )

    def _drop_reason(self, verdict: Verdict, counts: Mapping[str, int]) -> str:
        if verdict is Verdict.ZERO_VARIANCE and self.config.zero_variance_groups == "redraw":
            return "zero_variance"
        if counts.get("num_stale_tokens") and self.config.stale_tokens == "drop_group":
            return "stale"
        return ""

    def _row(
        self,
        row_id: str,
        source: TokenRow,
        advantages: NDArray[np.float64],
        step: int,
        book: Mapping[int, tuple[str, int]],
        counts: dict[str, int],
    ) -> Row | None:
        """The row to train, or None when all of its tokens are masked; adds to `counts`."""
        log_mu = as_float32(source.inference_logprobs)
        sampled = as_uint8(source.loss_mask) != 0
        sampled[:1] = False  # nothing predicts the first token
        staleness, is_current = self.ancestry.ages(as_int32(source.policy_versions), step, book)
        finite = np.isfinite(log_mu)
        fresh = staleness <= self.max_staleness
        _add(counts, "num_nonfinite_tokens", sampled & ~finite)
        _add(counts, "num_stale_tokens", sampled & finite & ~fresh)
        targets = np.flatnonzero(sampled & finite & fresh)
        if not len(targets):
            return None
        token_ids = as_int32(source.token_ids).astype(np.int64)
        return Row(
            row_id=row_id,
            token_ids=token_ids[: targets[-1]],
            targets=targets,
            target_ids=token_ids[targets],
            log_mu=log_mu[targets],
            advantages=self._final(advantages[targets]),
            staleness=staleness[targets],
            is_current=is_current[targets],
            turns=self._turns(source, targets),
        )

    def _final(self, advantages: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
        """Clipped and in the precision of the loss, unless the whole step is needed first."""
        if self.config.waits_for_step:
            return advantages
        if self.config.advantage_clip:
            advantages = advantages.clip(-self.config.advantage_clip, self.config.advantage_clip)
        return advantages.astype(np.float32)

    def _turns(self, source: TokenRow, targets: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if self.config.loss not in TURN_LOSSES:
            return None
        return np.searchsorted(as_int32(source.turn_ends)[:-1], targets, side="right")


def _returns(group: TrajectoryGroup) -> Returns:
    """What estimators look at; members without a sampled token are not valid."""
    masks = tuple(tuple(as_uint8(row.loss_mask) for row in member.rows) for member in group.members)
    is_valid = [
        member.outcome.is_valid and any(mask.any() for mask in row_masks)
        for member, row_masks in zip(group.members, masks, strict=True)
    ]
    greedy = [index for index, member in enumerate(group.members) if member.is_greedy]
    return Returns(
        rewards=np.array([member.reward for member in group.members], dtype=np.float64),
        is_valid=np.array(is_valid),
        row_rewards=tuple(np.array([row.reward for row in member.rows]) for member in group.members),
        loss_masks=masks,
        turns=tuple(_row_turns(member) for member in group.members),
        greedy=greedy[0] if greedy else -1,
    )


def _row_turns(member: Trajectory) -> tuple[Turns, ...]:
    return tuple(
        Turns(
            as_int32(row.turn_ends),
            as_float32(row.turn_rewards).astype(np.float64),
            as_int64(row.turn_hashes),
            row.first_turn,
        )
        for row in member.rows
    )


def _valid_rows(
    group: TrajectoryGroup, returns: Returns, advantages: Advantages
) -> Iterator[tuple[str, TokenRow, NDArray[np.float64]]]:
    """Name, tokens and advantages of every row of the valid members."""
    for index in np.flatnonzero(returns.is_valid):
        if index == returns.greedy:
            continue
        member = group.members[index]
        for row, per_token in zip(member.rows, advantages.per_token[index], strict=True):
            yield f"{member.episode_id}/{row.row_id}".rstrip("/"), row, per_token


def demonstration_row(
    row_id: str, token_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8]
) -> Row | None:
    """A row for the `sft` loss; None when its mask is empty."""
    targets = np.flatnonzero(loss_mask[1:] != 0) + 1
    if not len(targets):
        return None
    zeros = np.zeros(len(targets), dtype=np.float32)
    return Row(
        row_id=row_id,
        token_ids=token_ids[: targets[-1]],
        targets=targets,
        target_ids=token_ids[targets],
        log_mu=zeros,
        advantages=zeros,
        staleness=np.zeros(len(targets), dtype=np.int64),
        is_current=np.zeros(len(targets), dtype=np.bool_),
        log_pi_old=zeros,
    )


def _add(counts: dict[str, int], key: str, flags: NDArray[np.bool_]) -> None:
    counts[key] = counts.get(key, 0) + int(flags.sum())
