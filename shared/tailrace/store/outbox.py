"""Outbox: events of a run in one total order, until the relay has published them.

Scripts that change state write their events themselves; `emit` is for events outside Redis. No event is
dropped: an outbox without a relay grows until Redis is full, and its writers then get an error.
"""

import uuid
from collections.abc import Sequence

import msgspec

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.base import encode
from tailrace_protos.event import Event, EventBody
from tailrace_protos.subjects import redis_prefix

_REPEATS_WITHIN_S = 3600  # only the caller repeats a call, after a lost answer
_FOREVER = 0
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

    async def read(self, max_events: int, block_s: float) -> list[Event]:
        """Returns the oldest unacknowledged events; waits up to `block_s` for the first one.

        A second read before `ack` returns the same events, so a failed reader loses none.
        """
        events = await self._read(max_events)
        if not events:
            await self._redis.wait_for_entry(f"{self._prefix}outbox", "0-0", block_s)
            events = await self._read(max_events)
        return events

    async def ack(self, seqs: Sequence[str]) -> None:
        """Removes published events."""
        for start in range(0, len(seqs), _MAX_IDS):
            ids = seqs[start : start + _MAX_IDS]
            await self._redis.pipeline.script(scripts.ACK_OUTBOX, self._prefix, *ids)

    async def _read(self, max_events: int) -> list[Event]:
        entries = await self._redis.pipeline.script(scripts.READ_OUTBOX, self._prefix, max_events)
        return [_event(seq.decode(), fields) for seq, fields in entries]


def _event(seq: str, fields: list[bytes]) -> Event:
    """Decodes an entry; its time is that of Redis, so that it agrees with the order."""
    _, service, _, body = fields
    unix_ms = int(seq.partition("-")[0])
    return Event(
        seq=seq, unix_s=unix_ms / 1000, service=service.decode(), body=_body_decoder.decode(body)
    )
