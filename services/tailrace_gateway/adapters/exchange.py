"""One HTTP request and its answer, on the bare ASGI interface.

Invariants: a body is never read beyond its bound; an answer is begun once.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from tailrace_gateway.core.anthropic_messages import anthropic_error
from tailrace_gateway.core.errors import (
    ApiError,
    BadRequestError,
    ForbiddenError,
    TooLargeError,
)
from tailrace_gateway.core.openai_answers import openai_error
from tailrace_gateway.core.sse import to_json

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
ADMIN = ""  # the session id of a caller with the admin's key


class Exchange:
    """A request in the hands of its route. `caller` is the session that its key opens, or `ADMIN`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.route = "none"  # the pattern of the path, once it is found
        self.params: dict[str, str] = {}  # what the pattern captured
        self.caller = ADMIN
        self.status = 0  # of the answer, once it has begun
        self._headers: dict[bytes, bytes] = dict(scope["headers"])  # names come in lower case
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes

    def header(self, name: bytes) -> str:
        """A header by its name in lower case; empty: it was not sent."""
        return self._headers.get(name, b"").decode("latin-1")

    @property
    def speaks_anthropic(self) -> bool:
        """Which dialect errors are told in."""
        return self.path.startswith("/v1/messages") or b"anthropic-version" in self._headers

    def require_session(self) -> str:
        """The caller's session; the admin's key opens none."""
        if self.caller == ADMIN:
            raise ForbiddenError("model calls need the key of a session; this is the admin's")
        return self.caller

    def require_admin(self) -> None:
        """Only the admin may go on."""
        if self.caller != ADMIN:
            raise ForbiddenError("this needs the admin's key; this is the key of a session")

    async def body(self) -> bytes:
        """The whole body; `TooLargeError` when it is longer than allowed."""
        limit = self._max_body_bytes
        if int(self._headers.get(b"content-length") or 0) > limit:
            raise TooLargeError(f"the body has more than {limit} bytes")
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BadRequestError("the client hung up before its request was read")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLargeError(f"the body has more than {limit} bytes")
            parts.append(part)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def gone(self) -> None:
        """Return when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, content: Any, status: int = 200, headers: tuple[Any, ...] = ()) -> None:
        """A JSON answer."""
        body = to_json(content)
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Begin a stream of server-sent events."""
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """More events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def send_error(self, error: ApiError) -> None:
        """An error answer in the caller's dialect; clients are told whether asking again may help."""
        if self.status:  # too late for a status; a stream tells its own errors
            return
        content = (anthropic_error if self.speaks_anthropic else openai_error)(error)
        headers = [(b"x-should-retry", b"false" if error.retry_after_s is None else b"true")]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
            headers.append((b"retry-after-ms", str(int(error.retry_after_s * 1000)).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send_json(content, error.status, tuple(headers))
