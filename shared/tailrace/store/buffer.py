"""Trajectory buffer: groups from their admission to the checkpoint that covers them.

A group is recorded (`record_group`), and each member settles once (`put_trajectory`, `cancel_members`).
The last member closes the group: a train group with enough valid members waits for the learner, other
groups are discarded; payloads of evaluation are never stored. The learner takes the oldest first
(`next_groups`). It leaves places of its step for open groups that no later step may train
(`begin_groups` tells their age). A group that it has taken is retained until a checkpoint covers it
(`commit_checkpoint`) or it is dropped (`mark_dropped`).

A restarted learner gets all retained groups again, in the order in which they were taken. It may die
between the write of a checkpoint file and its commit. Therefore a checkpoint stores the entry ids that
it covers and the event, and a resuming learner commits the loaded checkpoint *before* its first
`next_groups`. The commit is idempotent: no group is released twice, and no event is emitted twice.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace.store.errors import MALFORMED
from tailrace.store.groups import (
    COUNTER_NAMES,
    BufferCounters,
    GroupRecord,
    PutResult,
    ReadyGroup,
    admitted_event,
    lost_group,
    read_group,
    settled_event,
    unplayed_trajectory,
)
from tailrace.store.quarantine import quarantine
from tailrace_protos.base import decode, encode
from tailrace_protos.episode import Outcome
from tailrace_protos.event import CheckpointSaved
from tailrace_protos.subjects import Phase, redis_prefix
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup

_START = "0-0"
NOTHING_OLD = -1
"""No step: every group may still be trained later."""
_CORRUPTED = -1  # scripts' answer for a group with a field that they cannot read


class TrajectoryBuffer:
    """Buffer of one run. Only one learner calls `next_groups`; any process may call the rest."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)
        self._taken_up_to = 0  # place in the order of taking
        self._seen_closing = _START
        self._is_nearly_full = False

    async def record_group(self, record: GroupRecord) -> None:
        """Records a group, before its episodes are published; idempotent."""
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
            record.step,
        )

    async def begin_groups(self, steps: Mapping[str, int], *, defer: bool = False) -> None:
        """Notes the optimizer step of the first tokens of open groups; a repeated note is ignored.

        `defer`: the new step wins, so that the learner does not wait for these groups now.
        """
        flat = [value for item in steps.items() for value in item]
        if flat:
            await self._script(scripts.BEGIN_GROUPS, self._prefix, "defer" if defer else "", *flat)

    async def open_groups(self) -> list[GroupRecord]:
        """Returns all open groups, sorted by index, with their attempts and settled members."""
        group_ids, ages = await asyncio.gather(
            self._redis.pipeline.command("ZRANGE", f"{self._prefix}open", 0, -1),
            self._redis.pipeline.command("ZRANGE", f"{self._prefix}ages", 0, -1, "WITHSCORES"),
        )
        begun: dict[str, int] = {}
        for entry in zip(ages[::2], ages[1::2], strict=True):
            try:
                begun[entry[0].decode()] = int(entry[1])
            except MALFORMED as error:
                await self._set_aside("age", "ZREM", "ages", entry, error)
        names: list[str] = []
        for group_id in group_ids:
            try:
                names.append(group_id.decode())
            except MALFORMED as error:
                await self._set_aside("open_group", "ZREM", "open", (group_id,), error)
        found = await asyncio.gather(*map(self._group, names))
        return [
            msgspec.structs.replace(record, begun_step=begun.get(record.group_id, -1))
            for record in found
            if record is not None
        ]

    async def group_ids(self) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the ids of open groups, and of closed ones that are for the learner or retained."""
        open_ids, sent_ids = await self._script(scripts.GROUP_IDS, self._prefix)
        return frozenset(map(_text, open_ids)), frozenset(map(_text, sent_ids))

    async def forget_group(
        self, group_id: str, phase: Phase, num_members: int, *, is_sent: bool, reason: str
    ) -> None:
        """Closes a group that is open for Redis or for the scheduler alone; it is not trained.

        `is_sent`: for the scheduler it waits for the learner. `phase` and `num_members` count where
        Redis does not know the group.
        """
        kind = "sent" if is_sent else "open"
        await self._script(
            scripts.FORGET_GROUP,
            self._prefix,
            group_id,
            phase,
            num_members,
            kind,
            "scheduler",
            reason,
        )

    async def raise_attempt(self, group_id: str, member: int, reason: str) -> int | None:
        """Raises the attempt number of a member and returns it; None if the member is settled.

        A corrupted group is closed.
        """
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
        if attempt == _CORRUPTED:
            await self._close_corrupted(group_id)
            return None
        return attempt

    async def cancel_members(
        self, group_id: str, members: Sequence[int], outcome: Outcome, reason: str
    ) -> bool:
        """Settles the open members among `members`; returns True if the group is closed now."""
        record = await self._group(group_id)
        if record is None:
            return True
        now = time.time()
        open_members = [member for member in members if member not in record.settled]
        ended = [unplayed_trajectory(record, member, outcome, reason, now) for member in open_members]
        _, _, closed = await self._settle(group_id, "scheduler", ended)
        return bool(closed)

    async def counters(self) -> BufferCounters:
        """Returns the current counters; a corrupted one begins again at 0."""
        counts: dict[str, int] = {}
        for entry in (await self._redis.read_hash(f"{self._prefix}counters")).items():
            try:
                counts[COUNTER_NAMES[entry[0]]] = int(entry[1])
            except MALFORMED as error:
                await self._set_aside("counter", "HDEL", "counters", entry, error)
        return BufferCounters(**counts)

    async def put_trajectory(self, trajectory: Trajectory) -> PutResult:
        """Settles an episode with its trajectory; a repeated call returns ALREADY_SETTLED."""
        known, settled, _ = await self._settle(trajectory.group_id, "agents", [trajectory])
        if not known:
            return PutResult.UNKNOWN_GROUP
        return PutResult.SETTLED if settled else PutResult.ALREADY_SETTLED

    async def next_groups(
        self, max_groups: int, block_s: float, old_step: int = NOTHING_OLD
    ) -> list[ReadyGroup]:
        """Returns up to `max_groups` closed groups, oldest first; after a start, retained ones before.

        `max_groups` is the number of places left in the learner's step. This step is the last that may
        train groups whose first tokens are of `old_step` or before: while as many of them are open as
        places are left, younger groups wait. Waits up to `block_s` for the first group.
        """
        taken = await self._take(max_groups, old_step)
        if not taken:
            await self._redis.wait_for_entry(f"{self._prefix}closings", self._seen_closing, block_s)
            taken = await self._take(max_groups, old_step)
        return taken

    @property
    def is_nearly_full(self) -> bool:
        """True if Redis was nearly full at the last `next_groups`, and a checkpoint frees a part."""
        return self._is_nearly_full

    def rewind(self) -> None:
        """Makes `next_groups` begin again with all retained groups, as after a start."""
        self._taken_up_to = 0

    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None:
        """Removes taken groups that are not trained; the scheduler may admit others."""
        await self._release("dropped", reason, "", b"", entry_ids)

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        """Removes the groups that a durable checkpoint covers and emits its event: atomic, once."""
        key = f"checkpoint/{event.lineage}/{event.step}"
        await self._release("trained", "", key, encode(event), entry_ids)

    async def end_training(self, lineage: str) -> None:
        """Asks the learner of this lineage to take no further step."""
        await self._redis.pipeline.command("SET", f"{self._prefix}ended_lineage", lineage)

    async def is_training_ended(self, lineage: str) -> bool:
        """Returns whether the learner of this lineage is to take no further step."""
        ended: bytes | None = await self._redis.pipeline.command("GET", f"{self._prefix}ended_lineage")
        return ended is not None and ended.decode() == lineage

    async def rebase_credit(self, num_trained_groups: int) -> None:
        """Recounts accepted groups: those trained by the resumed lineage plus all in the buffer."""
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
        if known == _CORRUPTED:
            await self._close_corrupted(group_id)
            return 1, 0, 1
        return known, settled, closed

    async def _take(self, max_groups: int, old_step: int) -> list[ReadyGroup]:
        closing, is_nearly_full, *entries = await self._script(
            scripts.TAKE_READY, self._prefix, self._taken_up_to, max_groups, old_step
        )
        self._seen_closing, self._is_nearly_full = closing.decode(), bool(is_nearly_full)
        if entries:
            self._taken_up_to = int(entries[-1][0])
        groups: list[ReadyGroup] = []
        for entry in entries:
            try:
                groups.append(_ready_group(entry))
            except MALFORMED as error:
                stream_id, group_id = entry[1].decode(), entry[2].decode(errors="replace")
                await quarantine(self._redis, self._prefix, "group", group_id, entry[5], error)
                await self.mark_dropped([stream_id], "corrupted")
        return groups

    async def _group(self, group_id: str) -> GroupRecord | None:
        """Returns the record of an open group with its progress; None if it is closed or corrupted.

        A corrupted one is closed and not trained, so that nobody waits for it.
        """
        fields = await self._redis.read_hash(f"{self._prefix}group:{group_id}")
        if not fields:
            return None
        try:
            return read_group(fields)
        except MALFORMED as error:
            await self._abandon(group_id, fields, error)
            return None

    async def _close_corrupted(self, group_id: str) -> None:
        """Closes a group in which a script found no number where one must be."""
        if fields := await self._redis.read_hash(f"{self._prefix}group:{group_id}"):
            error = ValueError("a field is no number, or its phase is unknown")
            await self._abandon(group_id, fields, error)

    async def _abandon(self, group_id: str, fields: Mapping[bytes, bytes], error: Exception) -> None:
        data = [part for field in fields.items() for part in field]
        await quarantine(self._redis, self._prefix, "open_group", group_id, data, error)
        lost = lost_group(group_id, fields)
        ends = map(encode, lost.ends)
        await self._script(
            scripts.ABANDON_GROUP,
            self._prefix,
            group_id,
            lost.phase,
            lost.num_members,
            "scheduler",
            *ends,
        )

    async def _set_aside(
        self, kind: str, command: str, key: str, entry: tuple[bytes, ...], error: Exception
    ) -> None:
        """Keeps the bytes of a corrupted entry and removes it, by its name, from its hash or set."""
        name = entry[0].decode(errors="replace")
        await quarantine(self._redis, self._prefix, kind, name, entry, error)
        await self._redis.pipeline.command(command, f"{self._prefix}{key}", entry[0])


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _ready_group(entry: list[Any]) -> ReadyGroup:
    _, stream_id, group_id, index, num_bytes, payloads = entry
    members = tuple(decode(payload, Trajectory) for payload in payloads)
    group = TrajectoryGroup(group_id=group_id.decode(), group_index=int(index), members=members)
    return ReadyGroup(stream_id.decode(), num_bytes, group)
