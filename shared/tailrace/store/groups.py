"""What the trajectory buffer takes and returns, and the audit events that its changes leave."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from tailrace_protos.base import as_uint8
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import EpisodeSettled, GroupAdmitted
from tailrace_protos.subjects import Phase
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the scheduler records it, and as it finds it again after a restart."""

    group_id: str
    group_index: int  # place in the data order of its phase
    phase: Phase
    tasks: tuple[EnvTask, ...]  # one per member
    deadline_unix_s: float
    min_valid: int  # fewer valid members than this: not for the learner
    step: int  # optimizer step at admission
    attempts: tuple[int, ...] = ()  # current attempt of each member; empty: all 0
    settled: dict[int, Outcome] = {}  # member -> outcome

    def episode_id(self, member: int) -> str:
        """Name of one member's episode."""
        return f"{self.group_id}.{member}"


class PutResult(enum.StrEnum):
    """What became of a trajectory that was put."""

    SETTLED = "settled"  # it is the member's one settlement
    ALREADY_SETTLED = "already_settled"  # another was first, or this one, repeated
    UNKNOWN_GROUP = "unknown_group"  # never recorded, or closed long ago


class ReadyGroup(NamedTuple):
    """A closed group on its way through the learner; `entry_id` is its name in the buffer."""

    entry_id: str
    num_bytes: int
    group: TrajectoryGroup


class BufferCounters(msgspec.Struct, frozen=True):
    """The buffer's accounts; `unconsumed` waits for the learner, `retained` for its next checkpoint."""

    next_group_index: int = 0  # of train groups
    accepted_groups: int = 0  # sent to the learner, dropped ones taken back
    unconsumed_groups: int = 0
    unconsumed_bytes: int = 0
    retained_groups: int = 0
    retained_bytes: int = 0


def admitted_event(record: GroupRecord) -> GroupAdmitted:
    """The event of a group's recording."""
    return GroupAdmitted(
        group_id=record.group_id,
        group_index=record.group_index,
        phase=record.phase,
        num_members=len(record.tasks),
        step=record.step,
    )


def settled_event(trajectory: Trajectory) -> EpisodeSettled:
    """The event of an episode's settlement; policy versions are -1 when nothing was sampled."""
    versions = [span.policy_version for row in trajectory.rows for span in row.spans]
    return EpisodeSettled(
        episode_id=trajectory.episode_id,
        group_id=trajectory.group_id,
        member=trajectory.member,
        phase=trajectory.phase,
        outcome=trajectory.outcome,
        reason=trajectory.reason,
        reward=trajectory.reward,
        success=trajectory.metrics.get("success"),
        num_sampled_tokens=sum(int(as_uint8(row.loss_mask).sum()) for row in trajectory.rows),
        num_turns=sum(len(row.turn_ends) // 4 for row in trajectory.rows),
        min_policy_version=min(versions, default=-1),
        max_policy_version=max(versions, default=-1),
        started_unix_s=trajectory.started_unix_s,
        finished_unix_s=trajectory.finished_unix_s,
    )


def unplayed_trajectory(
    record: GroupRecord, member: int, outcome: Outcome, reason: str, unix_s: float
) -> Trajectory:
    """What stands for a member that ended without tokens: cancelled, or given up."""
    return Trajectory(
        episode_id=record.episode_id(member),
        group_id=record.group_id,
        member=member,
        attempt=record.attempts[member] if record.attempts else 0,
        phase=record.phase,
        task=record.tasks[member],
        outcome=outcome,
        reason=reason,
        reward=0.0,
        metrics={},
        started_unix_s=unix_s,
        finished_unix_s=unix_s,
    )
