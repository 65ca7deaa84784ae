"""The episode journal: what was sampled and done, so that a redelivered episode does not do it again.

One writer at a time: `load` makes this journal object the episode's writer, and appends of whoever
wrote before are refused from then on. A journal ends with its episode's settlement.
"""

from __future__ import annotations

import enum
import uuid

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.base import encode
from tailrace_protos.journal import JournalRecord, decode_record
from tailrace_protos.subjects import redis_prefix

_LIFETIME_S = 7 * 24 * 3600  # since the last record; only abandoned journals get so old


class AppendResult(enum.StrEnum):
    """What became of a record."""

    APPENDED = "appended"
    SETTLED = "settled"  # the episode was settled or cancelled: stop playing it
    FENCED = "fenced"  # another worker loaded the journal and plays on: stop playing it


class Journal:
    """Journals of one run; one object per running attempt fences attempts from each other."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)
        self._writer = uuid.uuid4().hex

    async def append(self, episode_id: str, record: JournalRecord) -> AppendResult:
        """Keep a record at its index; repeating it does nothing."""
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
        """The records kept so far, in order; from now on only this object may append."""
        group_id, _, member = episode_id.rpartition(".")
        flat = await self._script(
            scripts.LOAD_JOURNAL, self._prefix, episode_id, group_id, member, self._writer, _LIFETIME_S
        )
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        indices = sorted(int(field) for field in fields if field != b"writer")
        return [decode_record(fields[str(index).encode()]) for index in indices]

    async def clear(self, episode_id: str) -> None:
        """Forget the records of an episode that begins anew, unless another writer took over."""
        await self._script(scripts.CLEAR_JOURNAL, self._prefix, episode_id, self._writer)
