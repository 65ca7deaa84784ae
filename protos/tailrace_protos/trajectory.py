"""Finished episodes as the learner reads them."""

from __future__ import annotations

from tailrace_protos.base import (
    EMPTY,
    Float32Bytes,
    Int32Bytes,
    Message,
    UInt8Bytes,
)
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.subjects import Phase


class Trajectory(Message, frozen=True, tag="trajectory"):
    """One settled episode: tokens exactly as the engine saw and emitted them.

    The four token arrays have the same length T; positions with `loss_mask` 0 were inserted by the
    renderer and have log-probability 0 and policy version -1.
    """

    episode_id: str
    group_id: str
    member: int
    attempt: int
    phase: Phase
    task: EnvTask
    outcome: Outcome
    reason: str  # why, when the outcome is not ok
    reward: float
    metrics: dict[str, float]  # e.g. success
    started_unix_s: float
    finished_unix_s: float
    token_ids: Int32Bytes = EMPTY  # [T]
    loss_mask: UInt8Bytes = EMPTY  # [T] 1 where the policy sampled
    inference_logprobs: Float32Bytes = EMPTY  # [T]
    policy_versions: Int32Bytes = EMPTY  # [T]
    turn_ends: Int32Bytes = EMPTY  # [K] end (exclusive) of each turn's tokens
    turn_rewards: Float32Bytes = EMPTY  # [K]


class TrajectoryGroup(Message, frozen=True, tag="trajectory_group"):
    """A closed group: its settled members, cancelled ones included (with empty arrays)."""

    group_id: str
    group_index: int
    members: tuple[Trajectory, ...]
