"""One delivery of a call to some worker: refused, accepted, answered, or lost."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from tailrace.bus import CallFailedError, NoResponderError
from tailrace.tools.port import raise_error_in
from tailrace.tools.wire import Form
from tailrace_protos.base import MalformedMessageError
from tailrace_protos.tool import CallReply, CallTool, ToolAccepted, ToolResult


class WorkerLostError(Exception):
    """The worker that had (or may have had) the call will not answer it; the text says why."""


class Attempt:
    """What becomes of one delivery. `accepted` comes first, then `result`."""

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
        """Who has it; empty before it was accepted, and if the worker takes no probes."""
        is_accepted = self.accepted.done() and not self.accepted.cancelled()
        return self.accepted.result().worker_id if is_accepted and not self.accepted.exception() else ""

    def receive(self, message: Msg) -> None:
        """Hear a reply."""
        try:
            raise_error_in(message, self.subject)
            decoded = Form.of(message.headers).decode(message.data, CallReply)
        except (NoResponderError, CallFailedError) as error:
            self.fail(error)
            return
        except MalformedMessageError as error:
            self.fail(WorkerLostError(f"a worker of {self.subject} answered nonsense: {error}"))
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
        """End without a result."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        if not self.result.done():
            self.result.set_exception(error)


def _retrieved(future: asyncio.Future[ToolAccepted] | asyncio.Future[ToolResult]) -> None:
    """Whether anybody still waits for it or not, an exception is no surprise."""
    if not future.cancelled():
        future.exception()
