"""One HTTP request and its response, on the bare ASGI interface.

Invariants: the gateway reads at most `max_body_bytes` of a body; a response starts once.
"""

from typing import Any

from starlette.types import Receive, Scope, Send

from tailrace_gateway.core.anthropic_messages import anthropic_error
from tailrace_gateway.core.errors import (
    ApiError,
    BadRequestError,
    ForbiddenError,
    MethodError,
    TooLargeError,
    UnsupportedError,
)
from tailrace_gateway.core.openai_answers import openai_error
from tailrace_gateway.core.sse import to_json

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_PLAIN = "identity"  # HTTP's name of the content coding that changes nothing
ADMIN = ""  # session id of a caller that has the admin key


class Exchange:
    """Request and response of a route call. `caller` is the key's session, or `ADMIN`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].rstrip("/") or "/"  # clients add slashes at will
        self.route = "none"  # the path pattern of the route, once found
        self.params: dict[str, str] = {}  # the path parameters
        self.caller = ADMIN
        self.status = 0  # of the response, once it has started
        self._headers: dict[bytes, bytes] = dict(scope["headers"])  # ASGI gives names in lower case
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes

    def header(self, name: bytes) -> str:
        """Return a header by its lower-case name, or an empty string if the client did not send it."""
        return self._headers.get(name, b"").decode("latin-1")

    @property
    def key(self) -> str:
        """Return the caller's key, or an empty string."""
        kind, *key = self.header(b"authorization").split(maxsplit=1)[:2] or ("",)
        if kind.lower() == "bearer" and key:
            return key[0].strip()
        return self.header(b"x-api-key").strip()

    @property
    def speaks_anthropic(self) -> bool:
        """True if errors of this request use Anthropic's format."""
        return self.path.startswith("/v1/messages") or b"anthropic-version" in self._headers

    def require_session(self) -> str:
        """Return the caller's session; raise `ForbiddenError` for the admin key."""
        if self.caller == ADMIN:
            raise ForbiddenError("model calls need the key of a session; this is the admin's")
        return self.caller

    def require_admin(self) -> None:
        """Raise `ForbiddenError` unless the caller has the admin key."""
        if self.caller != ADMIN:
            raise ForbiddenError("this needs the admin's key; this is the key of a session")

    async def body(self) -> bytes:
        """Read the whole body; raise `TooLargeError` if it exceeds the limit, and `UnsupportedError` if
        it is compressed."""
        limit = self._max_body_bytes
        self._require_plain()
        if int(self._headers.get(b"content-length") or 0) > limit:
            raise TooLargeError(f"the body has more than {limit} bytes")
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BadRequestError("the client disconnected before the end of its request")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLargeError(f"the body has more than {limit} bytes")
            parts.append(part)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _require_plain(self) -> None:
        coding = self.header(b"content-encoding").strip() or _PLAIN
        if coding.lower() != _PLAIN:
            raise UnsupportedError(
                f"Content-Encoding: {coding!r} is not supported here: send the body uncompressed",
                param="Content-Encoding",
            )

    async def gone(self) -> None:
        """Return when the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, content: Any, status: int = 200, headers: tuple[Any, ...] = ()) -> None:
        """Send a JSON response."""
        body = to_json(content)
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send_nothing(self) -> None:
        """Send a response without content."""
        self.status = 204
        await self._send({"type": "http.response.start", "status": 204, "headers": []})
        await self._send({"type": "http.response.body", "body": b""})

    async def begin_events(self) -> None:
        """Start a response of server-sent events."""
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send more events; `last` ends the response."""
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def send_error(self, error: ApiError) -> None:
        """Send an error in the caller's dialect; headers tell the client whether a retry can help."""
        if self.status:  # the response has started: its stream reports the error
            return
        content = (anthropic_error if self.speaks_anthropic else openai_error)(error)
        headers = [(b"x-should-retry", b"false" if error.retry_after_s is None else b"true")]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
            headers.append((b"retry-after-ms", str(int(error.retry_after_s * 1000)).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodError):
            headers.append((b"allow", error.allowed.encode()))
        await self.send_json(content, error.status, tuple(headers))
