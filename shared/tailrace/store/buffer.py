"""The trajectory buffer: groups from their admission to the checkpoint that holds what they taught.

A group is recorded (`record_group`), its members settle once each (`put_trajectory`, `cancel_members`);
the last one closes it: enough valid members send a train group to the learner, all else is discarded,
and evaluation payloads are never kept. A group taken by the learner (`next_groups`) is retained until a
checkpoint holds it (`commit_checkpoint`) or it is dropped (`mark_dropped`).

A learner that starts again reads all retained groups once more, in their first order. It may die
between writing a checkpoint file and committing it: so a checkpoint stores the entry ids that it covers
and the event, and a resuming learner commits the checkpoint that it loaded *before* its first
`next_groups`. Committing is idempotent: no group is released twice, no event emitted twice.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace.store.groups import (
    BufferCounters,
    GroupRecord,
    PutResult,
    ReadyGroup,
    admitted_event,
    settled_event,
    unplayed_trajectory,
)
from tailrace_protos.base import decode, encode
from tailrace_protos.episode import Outcome
from tailrace_protos.event import CheckpointSaved
from tailrace_protos.subjects import redis_prefix
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup

_START = "0-0"


class TrajectoryBuffer:
    """One run's buffer. `next_groups` belongs to one learner; all else may be called from anywhere."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)
        self._taken_up_to = _START

    async def record_group(self, record: GroupRecord) -> None:
        """Record a group before its episodes are published; repeating it does nothing."""
        await self._script(
            scripts.RECORD_GROUP,
            self._prefix,
            record.group_id,
            record.phase,
            record.group_index,
            len(record.tasks),
            record.min_valid,
            encode(record),
            "scheduler",
            encode(admitted_event(record)),
        )

    async def open_groups(self) -> list[GroupRecord]:
        """All groups not closed yet, by index, with their attempts and settled members."""
        group_ids = await self._redis.pipeline.command("ZRANGE", f"{self._prefix}open", 0, -1)
        found = await asyncio.gather(*(self._group(group_id.decode()) for group_id in group_ids))
        return [record for record in found if record is not None]

    async def raise_attempt(self, group_id: str, member: int, reason: str) -> int | None:
        """The member's next attempt number, or None if it is settled and need not go out again."""
        attempt: int | None = await self._script(
            scripts.RAISE_ATTEMPT,
            self._prefix,
            group_id,
            member,
            uuid.uuid4().hex,
            "scheduler",
            f"{group_id}.{member}",
            reason,
        )
        return attempt

    async def cancel_members(
        self, group_id: str, members: Sequence[int], outcome: Outcome, reason: str
    ) -> bool:
        """Settle those of `members` that are not settled yet; True if the group is closed now."""
        record = await self._group(group_id)
        if record is None:
            return True
        now = time.time()
        open_members = [member for member in members if member not in record.settled]
        ended = [unplayed_trajectory(record, member, outcome, reason, now) for member in open_members]
        _, _, closed = await self._settle(group_id, "scheduler", ended)
        return bool(closed)

    async def counters(self) -> BufferCounters:
        """The accounts as they stand."""
        counts = await self._redis.read_hash(f"{self._prefix}counters")
        return BufferCounters(**{name.decode(): int(value) for name, value in counts.items()})

    async def put_trajectory(self, trajectory: Trajectory) -> PutResult:
        """Settle an episode with what it produced. Repeating a call that won says ALREADY_SETTLED."""
        known, settled, _ = await self._settle(trajectory.group_id, "agents", [trajectory])
        if not known:
            return PutResult.UNKNOWN_GROUP
        return PutResult.SETTLED if settled else PutResult.ALREADY_SETTLED

    async def next_groups(self, max_groups: int, block_s: float) -> list[ReadyGroup]:
        """Up to `max_groups` closed groups in order; after a start the retained ones come first.

        Waits up to `block_s` for the first one.
        """
        taken = await self._take(max_groups)
        if not taken:
            await self._redis.wait_for_entry(f"{self._prefix}ready", self._taken_up_to, block_s)
            taken = await self._take(max_groups)
        return taken

    def rewind(self) -> None:
        """Let `next_groups` begin again with all retained groups, as after a start."""
        self._taken_up_to = _START

    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None:
        """Remove taken groups that will not be trained; the scheduler may admit others for them."""
        await self._release("dropped", reason, "", b"", entry_ids)

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        """Remove the groups that a durable checkpoint covers and emit its event, in one step, once."""
        key = f"checkpoint/{event.lineage}/{event.step}"
        await self._release("trained", "", key, encode(event), entry_ids)

    async def rebase_credit(self, num_trained_groups: int) -> None:
        """Count accepted groups anew: those trained by the resumed lineage and all in the buffer."""
        await self._script(scripts.REBASE_CREDIT, self._prefix, num_trained_groups)

    async def _release(
        self, kind: str, reason: str, key: str, event: bytes, entry_ids: Sequence[str]
    ) -> None:
        await self._script(
            scripts.RELEASE_READY, self._prefix, kind, reason, key, "learner", event, *entry_ids
        )

    async def _settle(
        self, group_id: str, service: str, ended: Sequence[Trajectory]
    ) -> tuple[int, int, int]:
        arguments: list[str | bytes | int] = []
        for trajectory in ended:
            arguments += (
                trajectory.member,
                trajectory.outcome.value,
                int(trajectory.outcome.is_valid),
                encode(trajectory),
                encode(settled_event(trajectory)),
            )
        known, settled, closed = await self._script(
            scripts.SETTLE_MEMBERS, self._prefix, group_id, service, *arguments
        )
        return known, settled, closed

    async def _take(self, max_groups: int) -> list[ReadyGroup]:
        entries = await self._script(scripts.TAKE_READY, self._prefix, self._taken_up_to, max_groups)
        taken = [_ready_group(entry) for entry in entries]
        if taken:
            self._taken_up_to = taken[-1].entry_id
        return taken

    async def _group(self, group_id: str) -> GroupRecord | None:
        """The record of an open group with its progress."""
        found = await self._redis.read_hash(f"{self._prefix}group:{group_id}")
        fields = {name.decode(): value for name, value in found.items()}
        if not fields:
            return None
        record = decode(fields["record"], GroupRecord)
        members = range(len(record.tasks))
        return GroupRecord(
            group_id=record.group_id,
            group_index=record.group_index,
            phase=record.phase,
            tasks=record.tasks,
            deadline_unix_s=record.deadline_unix_s,
            min_valid=record.min_valid,
            step=record.step,
            attempts=tuple(int(fields.get(f"a{member}", b"0")) for member in members),
            settled={m: Outcome(fields[f"s{m}"].decode()) for m in members if f"s{m}" in fields},
        )


def _ready_group(entry: list[Any]) -> ReadyGroup:
    stream_id, group_id, index, num_bytes, payloads = entry
    members = tuple(decode(payload, Trajectory) for payload in payloads)
    group = TrajectoryGroup(group_id=group_id.decode(), group_index=int(index), members=members)
    return ReadyGroup(stream_id.decode(), num_bytes, group)
