"""Episode journal: finished turns and tool calls, which a redelivered episode does not repeat.

A journal has one writer at a time: `load` makes a journal object the writer of an episode, and Redis
then refuses appends of earlier writers. A journal ends with the settlement of its episode.
"""

import enum
import uuid

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.base import encode
from tailrace_protos.journal import JournalRecord, decode_record
from tailrace_protos.subjects import redis_prefix

_LIFETIME_S = 7 * 24 * 3600  # after the last record; only abandoned journals expire


class AppendResult(enum.StrEnum):
    """Outcome of an append."""

    APPENDED = "appended"
    SETTLED = "settled"  # the episode is settled or cancelled: stop it
    FENCED = "fenced"  # another worker loaded the journal and continues: stop the episode here


class Journal:
    """Journals of one run; one object per running attempt."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)
        self._writer = uuid.uuid4().hex

    async def append(self, episode_id: str, record: JournalRecord) -> AppendResult:
        """Stores a record at its index; idempotent."""
        group_id, _, member = episode_id.rpartition(".")
        result = await self._script(
            scripts.APPEND_JOURNAL,
            self._prefix,
            episode_id,
            group_id,
            member,
            self._writer,
            _LIFETIME_S,
            record.index,
            encode(record),
        )
        return AppendResult(result.decode())

    async def load(self, episode_id: str) -> list[JournalRecord]:
        """Returns the stored records in order; from now on only this object may append."""
        group_id, _, member = episode_id.rpartition(".")
        flat = await self._script(
            scripts.LOAD_JOURNAL, self._prefix, episode_id, group_id, member, self._writer, _LIFETIME_S
        )
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        indices = sorted(int(field) for field in fields if field != b"writer")
        return [decode_record(fields[str(index).encode()]) for index in indices]

    async def clear(self, episode_id: str) -> None:
        """Removes the records of an episode that begins again, unless another writer took over."""
        await self._script(scripts.CLEAR_JOURNAL, self._prefix, episode_id, self._writer)
