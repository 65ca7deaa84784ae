"""Request and reply over NATS: the reply inbox, the wire form of errors, and the caller.

An error reply has no body but three headers: `Nats-Service-Error-Code` (400, 500, 503),
`Nats-Service-Error` (the reason) and, when a retry makes sense, `Retry-After` (seconds). A worker that
cannot serve yet also sends `Tailrace-Error: not_ready`.

Invariant: each expected reply is awaited inside `expect`, which always removes it.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from nats.aio.msg import Msg

from tailrace import metrics, tracing
from tailrace.bus.connection import Connection, Headers
from tailrace.bus.errors import CallFailedError, CallTimeoutError, NoResponderError
from tailrace.retry import Backoff
from tailrace_protos.base import Message, decode, encode
from tailrace_protos.generation import CallErrorCode

NO_RESPONDERS = "503"
REASON_HEADER = "Nats-Service-Error"
CODE_HEADER = "Nats-Service-Error-Code"
RETRY_AFTER_HEADER = "Retry-After"
KIND_HEADER = "Tailrace-Error"
MAX_REASON_CHARS = 2000  # headers count too: beyond `max_payload` nats-server closes the connection
_STATUS = {
    CallErrorCode.INVALID: "400",
    CallErrorCode.TOO_LONG: "400",
    CallErrorCode.INTERNAL: "500",
    CallErrorCode.OVERLOADED: "503",
    CallErrorCode.NOT_READY: "503",
}
_CODES = {"400": CallErrorCode.INVALID, "503": CallErrorCode.OVERLOADED}

R = TypeVar("R", bound=Message)


class ReplyInbox:
    """Receives replies to this process: one wildcard subscription, one future per expected reply."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prefix = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    async def open(self) -> None:
        """Subscribes; called once per process."""
        self._prefix = self._connection.client.new_inbox() + "."
        await self._connection.subscribe(self._prefix + "*", self._on_reply)

    @property
    def num_waiting(self) -> int:
        """Number of replies that have not arrived."""
        return len(self._waiting)

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """Yields the reply subject and the future of the reply."""
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
    """Tells if nats-server itself answered because the subject has no subscriber."""
    return not message.data and (message.headers or {}).get("Status") == NO_RESPONDERS


def header_text(text: str) -> str:
    """Returns a text as a header takes it: one line, UTF-8 (a lone surrogate is not), cut."""
    return " ".join(text[:MAX_REASON_CHARS].split()).encode(errors="replace").decode()


def error_headers(error: CallFailedError) -> Headers:
    """Encodes an error as reply headers."""
    headers = {
        CODE_HEADER: _STATUS[error.code],
        REASON_HEADER: header_text(error.reason),
        KIND_HEADER: error.code.value,
    }
    if error.retry_after_s > 0:
        headers[RETRY_AFTER_HEADER] = f"{error.retry_after_s:g}"
    return headers


def error_in(headers: Mapping[str, str] | None, subject: str) -> CallFailedError | None:
    """Decodes the error in a reply's headers, also from a worker in another language."""
    if not headers or CODE_HEADER not in headers:
        return None
    kind = headers.get(KIND_HEADER, "")
    known = kind in CallErrorCode.__members__.values()
    code = CallErrorCode(kind) if known else _CODES.get(headers[CODE_HEADER], CallErrorCode.INTERNAL)
    retry_after_s = _seconds(headers.get(RETRY_AFTER_HEADER, "0"))
    return CallFailedError(code, headers.get(REASON_HEADER, ""), retry_after_s, subject=subject)


def _seconds(text: str) -> float:
    """Parses a `Retry-After` value; dates and invalid text count as 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


class Caller:
    """Sends requests and waits for their replies."""

    def __init__(self, connection: Connection, inbox: ReplyInbox) -> None:
        self._connection = connection
        self._inbox = inbox

    async def request(
        self, subject: str, message: object, reply_type: type[R], timeout_s: float, retries: int
    ) -> R:
        """Calls a worker, with up to `retries` retries; a request that is INVALID is not retried.

        Each attempt has `timeout_s`; a retry waits at least the worker's `Retry-After`. Raises the
        error of the last attempt.
        """
        payload = encode(message)
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                return await self._attempt(subject, payload, reply_type, timeout_s)
            except (CallFailedError, NoResponderError, CallTimeoutError) as error:
                is_invalid = isinstance(error, CallFailedError) and error.code is CallErrorCode.INVALID
                if is_invalid or backoff.num_failures >= retries:
                    raise
                advised_s = error.retry_after_s if isinstance(error, CallFailedError) else 0.0
                await asyncio.sleep(max(advised_s, backoff.next_s()))

    async def _attempt(self, subject: str, payload: bytes, reply_type: type[R], timeout_s: float) -> R:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        reply = await self._exchange(subject, payload, timeout_s)
        metrics.BUS_CALL_SECONDS.observe(loop.time() - started_s)
        if reply.headers:
            if is_no_responders(reply):
                raise NoResponderError(subject)
            error = error_in(reply.headers, subject)
            if error is not None:
                raise error
        return decode(reply.data, reply_type)

    async def _exchange(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        headers = tracing.headers()
        with self._inbox.expect() as (inbox, reply):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connection.publish(subject, payload, reply=inbox, headers=headers)
                    return await reply
            except TimeoutError as error:
                raise CallTimeoutError(subject, timeout_s) from error
