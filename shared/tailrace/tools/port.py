"""`ToolPort`: a caller's requests to tool workers and their replies, in JSON, with its own inbox.

A call has more than one reply, so requests of the bus do not fit. Invariant: code that expects a reply
also forgets it.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from nats.aio.msg import Msg

from tailrace import tracing
from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.bus.calls import error_in, is_no_responders
from tailrace.tools.wire import JSON, WireFormat
from tailrace_protos.base import MalformedMessageError, Message
from tailrace_protos.tool import CallReply, CallTool, ToolAccepted, ToolResult

Receive = Callable[[Msg], None]

R = TypeVar("R", bound=Message)


class ToolPort:
    """Sends tool messages and receives their replies."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._prefix = ""
        self._opening = asyncio.Lock()
        self._tokens = itertools.count()
        self._receivers: dict[str, Receive] = {}

    async def open(self) -> None:
        """Subscribes to the inbox; idempotent."""
        async with self._opening:
            if not self._prefix:
                prefix = self.bus.connection.client.new_inbox() + "."
                await self.bus.connection.subscribe(prefix + "*", self._on_reply)
                self._prefix = prefix

    def expect(self, receive: Receive) -> str:
        """Returns a reply subject for `receive`; `forget` it afterwards."""
        token = format(next(self._tokens), "x")
        self._receivers[token] = receive
        return self._prefix + token

    def forget(self, reply: str) -> None:
        """Ignores later replies on a reply subject."""
        self._receivers.pop(reply[len(self._prefix) :], None)

    async def send(self, subject: str, message: object, reply: str = "") -> None:
        """Publishes a message; raises `OversizedMessageError`."""
        headers = {**JSON.headers, **tracing.headers()}
        await self.bus.connection.publish(subject, JSON.encode(message), reply=reply, headers=headers)

    async def ask(self, subject: str, message: object, reply_type: type[R], timeout_s: float) -> R:
        """Sends one request and returns its reply; raises the errors of `Bus.request`."""
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

    async def gather(
        self,
        subject: str,
        within_s: float,
        take: Callable[[bytes], bool],
        stall_s: float | None = None,
    ) -> None:
        """Asks all workers on `subject`, and gives their replies to `take`.

        Ends when `take` returns True, after `within_s`, `stall_s` after the newest reply, and at once
        if nobody listens.
        """
        await self.open()
        enough = asyncio.Event()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        limit = asyncio.timeout_at(end_s)

        def receive(message: Msg) -> None:
            if is_no_responders(message) or take(message.data):
                enough.set()
            elif stall_s is not None and not limit.expired():
                limit.reschedule(min(end_s, loop.time() + stall_s))

        reply = self.expect(receive)
        try:
            async with limit:
                await self.bus.connection.publish(subject, b"", reply=reply)
                await enough.wait()
        except TimeoutError:
            pass  # all present workers have answered
        finally:
            self.forget(reply)

    async def _on_reply(self, message: Msg) -> None:
        receive = self._receivers.get(message.subject[len(self._prefix) :])
        if receive is not None:
            receive(message)


def raise_error_in(message: Msg, subject: str) -> None:
    """Raises `NoResponderError` or `CallFailedError` if the reply is one."""
    if is_no_responders(message):
        raise NoResponderError(subject)
    headers: dict[str, Any] | None = message.headers
    error = error_in(headers, subject)
    if error is not None:
        raise error


class WorkerLostError(Exception):
    """The worker that has (or may have) the call will not answer it; the text gives the reason."""


class MalformedAnswerError(WorkerLostError):
    """A worker answered a call with bytes that are no message; another attempt would not help."""

    def __init__(self, subject: str, error: MalformedMessageError) -> None:
        super().__init__(f"a worker of {subject} sent a malformed answer: {error}")


class CallAttempt:
    """One delivery of a call to a worker: first `accepted`, then `result`, or an error."""

    def __init__(self, request: CallTool, subject: str) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.subject = subject
        self.reply = ""
        self.accepted: asyncio.Future[ToolAccepted] = loop.create_future()
        self.result: asyncio.Future[ToolResult] = loop.create_future()
        self.num_missed = 0  # probes in a row that did not find it running
        for future in (self.accepted, self.result):
            future.add_done_callback(_retrieved)

    @property
    def worker_id(self) -> str:
        """Worker of the call; empty before it is accepted, and for a worker without probes."""
        is_accepted = self.accepted.done() and not self.accepted.cancelled()
        return self.accepted.result().worker_id if is_accepted and not self.accepted.exception() else ""

    def receive(self, message: Msg) -> None:
        """Handles a reply."""
        try:
            raise_error_in(message, self.subject)
            decoded = WireFormat.of(message.headers).decode(message.data, CallReply)
        except (NoResponderError, CallFailedError) as error:
            refused_late = f"the worker accepted the call, and then refused it: {error}"
            self.fail(WorkerLostError(refused_late) if self.accepted.done() else error)
            return
        except MalformedMessageError as error:
            self.fail(MalformedAnswerError(self.subject, error))
            return
        if isinstance(decoded, ToolAccepted):
            if not self.accepted.done():
                self.accepted.set_result(decoded)
            return
        if not self.accepted.done():
            self.accepted.set_result(ToolAccepted(decoded.call_id))
        if not self.result.done():
            self.result.set_result(decoded)

    def fail(self, error: Exception) -> None:
        """Ends the attempt without a result."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        if not self.result.done():
            self.result.set_exception(error)


def _retrieved(future: asyncio.Future[ToolAccepted] | asyncio.Future[ToolResult]) -> None:
    """Reads the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()
