"""Replies: one wildcard subscription, one future per expected message.

Invariant: every expected reply is awaited inside `expect`, which forgets it however it ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from tailrace.bus.connection import Connection

NO_RESPONDERS = "503"


class ReplyInbox:
    """Where replies to this process arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prefix = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    async def open(self) -> None:
        """Subscribe; once per process."""
        self._prefix = self._connection.client.new_inbox() + "."
        await self._connection.subscribe(self._prefix + "*", self._on_reply)

    @property
    def num_waiting(self) -> int:
        """Replies not here yet."""
        return len(self._waiting)

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """The subject to reply to, and the reply to await."""
        token = format(next(self._tokens), "x")
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = reply
        try:
            yield self._prefix + token, reply
        finally:
            del self._waiting[token]

    async def _on_reply(self, message: Msg) -> None:
        reply = self._waiting.get(message.subject[len(self._prefix) :])
        if reply is not None and not reply.done():
            reply.set_result(message)


def is_no_responders(message: Msg) -> bool:
    """Whether the server itself answered, since nobody listens."""
    return not message.data and (message.headers or {}).get("Status") == NO_RESPONDERS
