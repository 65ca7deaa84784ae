"""`ToolPort`: a caller's way to tool workers, in JSON, with an inbox of its own.

A call has more than one reply, which the bus's own requests do not know. Invariant: what was expected
is forgotten by whoever expected it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from nats.aio.msg import Msg

from tailrace import tracing
from tailrace.bus import Bus, CallTimeoutError, NoResponderError
from tailrace.bus.calls import error_in, is_no_responders
from tailrace.tools.wire import JSON
from tailrace_protos.base import Message

R = TypeVar("R", bound=Message)

Receive = Callable[[Msg], None]


class ToolPort:
    """Sends tool messages and hears replies."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._prefix = ""
        self._opening = asyncio.Lock()
        self._tokens = itertools.count()
        self._receivers: dict[str, Receive] = {}

    async def open(self) -> None:
        """Subscribe to the inbox; once is enough, more do no harm."""
        async with self._opening:
            if not self._prefix:
                prefix = self.bus.connection.client.new_inbox() + "."
                await self.bus.connection.subscribe(prefix + "*", self._on_reply)
                self._prefix = prefix

    def expect(self, receive: Receive) -> str:
        """The subject to reply to; `forget` it afterwards."""
        token = format(next(self._tokens), "x")
        self._receivers[token] = receive
        return self._prefix + token

    def forget(self, reply: str) -> None:
        """Hear nothing more on a reply subject."""
        self._receivers.pop(reply[len(self._prefix) :], None)

    async def send(self, subject: str, message: object, reply: str = "") -> None:
        """Publish; raises `OversizedMessageError`."""
        headers = JSON.headers
        traceparent = tracing.current_traceparent()
        if traceparent:
            headers[tracing.HEADER] = traceparent
        await self.bus.connection.publish(subject, JSON.encode(message), reply=reply, headers=headers)

    async def ask(self, subject: str, message: object, reply_type: type[R], timeout_s: float) -> R:
        """One request, one reply; raises what `Bus.request` raises."""
        await self.open()
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        reply = self.expect(lambda received: None if answer.done() else answer.set_result(received))
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(subject, message, reply)
                received = await answer
        except TimeoutError as error:
            raise CallTimeoutError(subject, timeout_s) from error
        finally:
            self.forget(reply)
        raise_error_in(received, subject)
        decoded: R = JSON.decode(received.data, reply_type)
        return decoded

    async def gather(self, subject: str, within_s: float, take: Callable[[bytes], bool]) -> None:
        """Ask everybody on `subject`; `take` each reply until it says enough, or `within_s` is over."""
        await self.open()
        enough = asyncio.Event()

        def receive(message: Msg) -> None:
            if is_no_responders(message) or take(message.data):
                enough.set()

        reply = self.expect(receive)
        try:
            await self.bus.connection.publish(subject, b"", reply=reply)
            async with asyncio.timeout(within_s):
                await enough.wait()
        except TimeoutError:
            pass  # whoever is there has answered
        finally:
            self.forget(reply)

    async def _on_reply(self, message: Msg) -> None:
        receive = self._receivers.get(message.subject[len(self._prefix) :])
        if receive is not None:
            receive(message)


def raise_error_in(message: Msg, subject: str) -> None:
    """Raise `NoResponderError` or `CallFailedError` if that is what a reply says."""
    if is_no_responders(message):
        raise NoResponderError(subject)
    headers: dict[str, Any] | None = message.headers
    error = error_in(headers, subject)
    if error is not None:
        raise error
