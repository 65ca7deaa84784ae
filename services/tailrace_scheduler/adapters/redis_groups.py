"""Groups, attempts and events in Redis, as the shared store keeps them."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from tailrace.store import Blobs, GroupRecord, Outbox, StoreConnection, TrajectoryBuffer
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EventBody
from tailrace_protos.subjects import Phase
from tailrace_scheduler.ports import GroupPlan, StoredGroups


class RedisGroups:
    """The `GroupStore` of one run."""

    def __init__(self, connection: StoreConnection, run: str) -> None:
        self._buffer = TrajectoryBuffer(connection, run)
        self._outbox = Outbox(connection, run)
        self._blobs = Blobs(connection, run)

    async def record(self, plans: Sequence[GroupPlan]) -> None:
        """Record groups; what is issued together goes out as one pipeline, in order."""
        records = [msgspec.convert(plan, GroupRecord, from_attributes=True) for plan in plans]
        await asyncio.gather(*(self._buffer.record_group(record) for record in records))

    async def open_plans(self) -> list[GroupPlan]:
        """All groups not closed yet."""
        records = await self._buffer.open_groups()
        return [msgspec.convert(record, GroupPlan, from_attributes=True) for record in records]

    async def next_group_index(self) -> int:
        """Place in the data order of the first train group never recorded."""
        return (await self._buffer.counters()).next_group_index

    async def begin(self, steps: Mapping[str, int], *, defer: bool = False) -> None:
        """Note the optimizer step of the first tokens of open groups; `defer`: the new step wins."""
        await self._buffer.begin_groups(steps, defer=defer)

    async def places_kept(self) -> int:
        """Places of the learner's step for which it found no group that it may take."""
        return (await self._buffer.counters()).places_kept

    async def end_training(self, lineage: str) -> None:
        """Ask the learner of this lineage to take no further step."""
        await self._buffer.end_training(lineage)

    async def settle(
        self, group_id: str, members: Sequence[int], outcome: Outcome, reason: str
    ) -> None:
        """Settle those of `members` that have not ended."""
        await self._buffer.cancel_members(group_id, members, outcome, reason)

    async def raise_attempt(self, group_id: str, member: int, reason: str) -> int | None:
        """The member's next attempt, or None if it has settled."""
        return await self._buffer.raise_attempt(group_id, member, reason)

    async def group_ids(self) -> StoredGroups:
        """Ids of all groups in the buffer."""
        return StoredGroups(*await self._buffer.group_ids())

    async def forget(self, group_id: str, phase: Phase, num_members: int, *, is_sent: bool) -> None:
        """Close a group that is open for Redis or for the scheduler alone; it is not trained."""
        reason = "its writes were lost"
        await self._buffer.forget_group(group_id, phase, num_members, is_sent=is_sent, reason=reason)

    async def emit(self, once: str, body: EventBody) -> None:
        """Write an event into the outbox, once for ever under this id."""
        await self._outbox.emit("scheduler", body, once=once)

    async def has_model(self) -> bool:
        """Tell whether the learner has written the model card."""
        return await self._blobs.get_model_card() is not None
