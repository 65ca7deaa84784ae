"""Outbox of events, and journals of episodes: the append-only records of a run.

The outbox keeps all events in one total order until the relay has published them. Scripts that change
state write their events themselves; `emit` is for events outside Redis. No event is dropped: an outbox
without a relay grows until Redis is full, and its writers then get an error.

A journal keeps finished turns and tool calls, which a redelivered episode does not repeat. It has one
writer at a time: `load` makes a journal object the writer of an episode, and Redis then refuses appends
of earlier writers. A journal ends with the settlement of its episode.
"""

import enum
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace.store.errors import MALFORMED
from tailrace.store.quarantine import quarantine
from tailrace_protos.base import encode
from tailrace_protos.event import Event, EventBody
from tailrace_protos.journal import JournalRecord, OldRecordError, decode_record
from tailrace_protos.subjects import redis_prefix

_REPEATS_WITHIN_S = 3600  # only the caller repeats a call, after a lost answer
_FOREVER = 0
_FIRST = "0-0"
_body_decoder: msgspec.msgpack.Decoder[EventBody] = msgspec.msgpack.Decoder(EventBody)
_MAX_IDS = 1000  # values that Lua unpacks at once


class Outbox:
    """Events of one run; many writers, one reader."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._prefix = redis_prefix(run)

    async def emit(
        self, service: str, *bodies: EventBody, once: str = "", once_s: int = _FOREVER
    ) -> None:
        """Appends events atomically.

        Of several calls with the same `once`, only the first appends: the first ever, or within
        `once_s`.
        """
        await self._redis.pipeline.script(
            scripts.EMIT_EVENTS,
            self._prefix,
            once or uuid.uuid4().hex,
            once_s if once else _REPEATS_WITHIN_S,
            service,
            *(encode(body) for body in bodies),
        )

    async def read(self, max_events: int, block_s: float, after: str = "") -> list[Event]:
        """Returns the oldest unacknowledged events; waits up to `block_s` for the first one.

        A second read before `ack` returns the same events, so a failed reader loses none. With `after`
        it leaves out those up to this id that an earlier read returned.
        """
        after = after or _FIRST
        events = await self._read(max_events, after)
        if not events:
            await self._redis.wait_for_entry(f"{self._prefix}outbox", after, block_s)
            events = await self._read(max_events, after)
        return events

    async def ack(self, seqs: Sequence[str]) -> None:
        """Removes published events."""
        for start in range(0, len(seqs), _MAX_IDS):
            ids = seqs[start : start + _MAX_IDS]
            await self._redis.pipeline.script(scripts.ACK_OUTBOX, self._prefix, *ids)

    async def _read(self, max_events: int, after: str) -> list[Event]:
        entries = await self._redis.pipeline.script(
            scripts.READ_OUTBOX, self._prefix, max_events, after
        )
        events: list[Event] = []
        for encoded, fields in entries:
            seq = encoded.decode()
            try:
                events.append(_event(seq, fields))
            except MALFORMED as error:
                await quarantine(self._redis, self._prefix, "event", seq, fields or (), error)
                await self.ack([seq])
        return events


def _event(seq: str, fields: Any) -> Event:
    """Decodes an entry; its time is that of Redis, so that it agrees with the order.

    One that somebody deleted before it was acknowledged has no fields.
    """
    _, service, _, body = fields
    unix_ms = int(seq.partition("-")[0])
    return Event(
        seq=seq, unix_s=unix_ms / 1000, service=service.decode(), body=_body_decoder.decode(body)
    )


_LIFETIME_S = 7 * 24 * 3600  # after the last record; only abandoned journals expire


class AppendResult(enum.StrEnum):
    """Outcome of an append."""

    APPENDED = "appended"
    SETTLED = "settled"  # the episode is settled or cancelled: stop it
    FENCED = "fenced"  # another worker loaded the journal and continues: stop the episode here
    REDELIVERED = "redelivered"  # the same, and that worker settles the same message


class Journal:
    """Journals of one run; one object per running attempt.

    `message` names the message that the attempt settles; empty: no other attempt has it.
    """

    def __init__(self, redis: StoreConnection, run: str, message: str = "") -> None:
        self._redis = redis
        self._script = redis.pipeline.script
        self._prefix = redis_prefix(run)
        unique = uuid.uuid4().hex
        self._message = message or unique
        self._writer = f"{self._message}/{unique}"

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
        """Returns the stored records in order; from now on only this object may append.

        A journal with a corrupted record is set aside, and its episode begins again. Raises
        `OldRecordError`.
        """
        group_id, _, member = episode_id.rpartition(".")
        flat = await self._script(
            scripts.LOAD_JOURNAL, self._prefix, episode_id, group_id, member, self._writer, _LIFETIME_S
        )
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            indices = sorted(int(field) for field in fields if field != b"writer")
            return [decode_record(fields[str(index).encode()]) for index in indices]
        except OldRecordError:
            raise
        except MALFORMED as error:
            await quarantine(self._redis, self._prefix, "journal", episode_id, flat, error)
            await self.clear(episode_id)
            return await self.load(episode_id)

    async def taken_by(self, episode_id: str) -> AppendResult | None:
        """Returns FENCED or REDELIVERED if another object has loaded the journal since this one did."""
        key = f"{self._prefix}journal:{episode_id}"
        found: bytes | None = await self._redis.pipeline.command("HGET", key, "writer")
        writer = self._writer if found is None else found.decode()
        if writer == self._writer:
            return None
        is_same = writer.partition("/")[0] == self._message
        return AppendResult.REDELIVERED if is_same else AppendResult.FENCED

    async def clear(self, episode_id: str) -> None:
        """Removes the records of an episode that begins again, unless another writer took over."""
        await self._script(scripts.CLEAR_JOURNAL, self._prefix, episode_id, self._writer)
