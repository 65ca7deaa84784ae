"""Reads a durable pull consumer in batches, as tests look at streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from tailrace.bus import Bus
from tailrace_protos.base import decode

M = TypeVar("M")
Pulls = dict[tuple[str, str], JetStreamContext.PullSubscription]

_pulls: WeakKeyDictionary[Bus, Pulls] = WeakKeyDictionary()


async def consume(
    bus: Bus, stream: str, durable: str, message_type: type[M], batch: int, timeout_s: float
) -> list[tuple[M, Callable[[], Awaitable[None]]]]:
    """Returns up to `batch` messages that arrive within `timeout_s`, each with its acknowledgement."""
    await bus.connection.wait_connected()
    pulls = _pulls.setdefault(bus, {})
    try:
        if (stream, durable) not in pulls:
            pulls[stream, durable] = await bus.jetstream.pull_subscribe_bind(durable, stream)
        messages = await pulls[stream, durable].fetch(batch, timeout_s)
    except TimeoutError:  # of nats-py (a subclass) or of asyncio
        return []
    except (nats.errors.NoRespondersError, nats.js.errors.APIError):
        await asyncio.sleep(min(timeout_s, 0.5))
        return []
    return [
        (
            decode(message.data, message_type),
            partial(bus.connection.publish, message.reply, b"+ACK"),
        )
        for message in messages
    ]
