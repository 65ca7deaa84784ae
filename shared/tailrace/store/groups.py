"""Records of the trajectory buffer, and the audit events of its changes."""

import enum
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tailrace_protos.base import as_uint8, decode
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import EpisodeSettled, GroupAdmitted
from tailrace_protos.subjects import Phase
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup

_NUMBERS = (b"members", b"min_valid", b"left", b"valid", b"bytes", b"index", b"step")
_MAX_REASON_CHARS = 40_000  # of an event, which one NATS message must hold
_MOST_DIGITS = 5  # of the number of members in a group whose record is corrupted


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Group as the scheduler records it and reads it after a restart."""

    group_id: str
    group_index: int  # position in the data order of its phase
    phase: Phase
    tasks: tuple[EnvTask, ...]  # one per member
    deadline_unix_s: float
    min_valid: int  # smallest number of valid members for the learner
    step: int  # optimizer step at admission
    timeout_s: float = 0.0  # from admission to the deadline
    attempts: tuple[int, ...] = ()  # current attempt of each member; empty: all 0
    settled: dict[int, Outcome] = {}  # member -> outcome
    begun_step: int = -1  # optimizer step of its first tokens; -1: none was sampled

    def episode_id(self, member: int) -> str:
        """Returns the id of one member's episode."""
        return f"{self.group_id}.{member}"


def read_group(fields: Mapping[bytes, bytes]) -> GroupRecord:
    """Decodes the record of an open group with its progress; raises one of `MALFORMED`."""
    for name in fields:
        name.decode()
    for name in _NUMBERS:
        int(fields[name])
    record = decode(fields[b"record"], GroupRecord)
    if fields[b"phase"].decode() != record.phase:
        raise ValueError(f"its phase is {record.phase}, found {fields[b'phase']!r}")
    attempts = [fields.get(b"a%d" % member, b"0") for member in range(len(record.tasks))]
    ended = [(member, fields.get(b"s%d" % member)) for member in range(len(record.tasks))]
    return msgspec.structs.replace(
        record,
        attempts=tuple(map(int, attempts)),
        settled={member: Outcome(text.decode()) for member, text in ended if text is not None},
    )


class LostGroup(NamedTuple):
    """Rest of an open group whose record cannot be decoded."""

    phase: Phase
    num_members: int
    ends: list[EpisodeSettled]  # of members that have not ended


class PutResult(enum.StrEnum):
    """Outcome of `put_trajectory`."""

    SETTLED = "settled"  # it settled the member
    ALREADY_SETTLED = "already_settled"  # an earlier call settled the member
    UNKNOWN_GROUP = "unknown_group"  # never recorded, or removed after its close


class ReadyGroup(NamedTuple):
    """Closed group for the learner; `entry_id` identifies it in the buffer."""

    entry_id: str
    num_bytes: int
    group: TrajectoryGroup


class BufferCounters(msgspec.Struct, frozen=True):
    """Counters of the buffer: `unconsumed` groups wait for the learner, `retained` for a checkpoint."""

    next_group_index: int = 0  # of train groups
    accepted_groups: int = 0  # sent to the learner, without dropped ones
    unconsumed_groups: int = 0
    unconsumed_bytes: int = 0
    retained_groups: int = 0
    retained_bytes: int = 0
    num_taken: int = 0  # groups ever taken by a learner
    places_kept: int = 0  # of the learner's step, after its last take; counted where places are kept


COUNTER_NAMES = {name.encode(): name for name in BufferCounters.__struct_fields__}
"""Names of the counters as Redis has them."""


def admitted_event(record: GroupRecord) -> GroupAdmitted:
    """Builds the event of a recorded group."""
    return GroupAdmitted(
        group_id=record.group_id,
        group_index=record.group_index,
        phase=record.phase,
        num_members=len(record.tasks),
        step=record.step,
    )


def settled_event(trajectory: Trajectory) -> EpisodeSettled:
    """Builds the event of a settled episode; policy versions are -1 without sampled tokens."""
    versions = [span.policy_version for row in trajectory.rows for span in row.spans]
    return EpisodeSettled(
        episode_id=trajectory.episode_id,
        group_id=trajectory.group_id,
        member=trajectory.member,
        phase=trajectory.phase,
        outcome=trajectory.outcome,
        reason=trajectory.reason[:_MAX_REASON_CHARS],
        reward=trajectory.reward,
        success=trajectory.success,
        num_sampled_tokens=sum(int(as_uint8(row.loss_mask).sum()) for row in trajectory.rows),
        num_turns=sum(len(row.turn_ends) // 4 for row in trajectory.rows),
        min_policy_version=min(versions, default=-1),
        max_policy_version=max(versions, default=-1),
        started_unix_s=trajectory.started_unix_s,
        finished_unix_s=trajectory.finished_unix_s,
        num_tool_calls=int(trajectory.metrics.get("num_tool_calls", -1)),
        num_cut_replies=int(trajectory.metrics.get("num_cut_replies", 0)),
        stages=trajectory.stages,
        context_tokens=max((len(row.token_ids) // 4 for row in trajectory.rows), default=0),
        reports_success=trajectory.reports_success,
    )


def unplayed_trajectory(
    record: GroupRecord, member: int, outcome: Outcome, reason: str, unix_s: float
) -> Trajectory:
    """Builds the trajectory of a member that ended without tokens: cancelled or abandoned."""
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


def lost_group(group_id: str, fields: Mapping[bytes, bytes]) -> LostGroup:
    """Reads what is left of a group in Redis, to close it."""
    phase: Phase = "eval" if fields.get(b"phase") == b"eval" else "train"
    number = fields.get(b"members", b"")
    num_members = int(number) if number.isdigit() and len(number) <= _MOST_DIGITS else 0
    record = GroupRecord(
        group_id=group_id,
        group_index=-1,
        phase=phase,
        tasks=(EnvTask("", 0),) * num_members,
        deadline_unix_s=0.0,
        min_valid=num_members,
        step=0,
    )
    reason, now_s = "its group was corrupted in Redis", time.time()
    ends = [
        settled_event(unplayed_trajectory(record, member, Outcome.INFRA_FAILURE, reason, now_s))
        for member in range(num_members)
        if b"s%d" % member not in fields
    ]
    return LostGroup(phase, num_members, ends)
