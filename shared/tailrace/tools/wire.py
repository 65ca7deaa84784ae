"""Wire format of tool messages: JSON or msgpack, large payloads by claim check, replies of a worker.

The `Content-Type` header names the format, and a reply has the format of its request. Callers of
Tailrace send JSON, which every language can read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tailrace.bus import Bus, CallFailedError
from tailrace.bus.calls import error_headers
from tailrace.bus.connection import HEADER_ALLOWANCE_BYTES, Headers
from tailrace.store import BlobGoneError, Blobs, StoreConnection, StoreError
from tailrace.tools.conversion import infra_result, too_large
from tailrace_protos.base import (
    JSON_CONTENT_TYPE,
    MSGPACK_CONTENT_TYPE,
    decode,
    decode_json,
    encode,
    encode_json,
)
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import CallTool, ToolResult

CONTENT_TYPE = "Content-Type"
BLOB_TTL_S = 900.0
_SHARED = "tools"  # owner of payloads without a run

M = TypeVar("M")


class WireFormat(msgspec.Struct, frozen=True):
    """Message format of a peer."""

    content_type: str

    @classmethod
    def of(cls, headers: Mapping[str, str] | None) -> "WireFormat":
        """Returns the format that a message's headers name; msgpack by default."""
        kind = (headers or {}).get(CONTENT_TYPE, MSGPACK_CONTENT_TYPE).partition(";")[0].strip()
        return JSON if kind.lower() == JSON_CONTENT_TYPE else MSGPACK

    def encode(self, message: object) -> bytes:
        """Encodes a message."""
        return encode_json(message) if self.content_type == JSON_CONTENT_TYPE else encode(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decodes a message; raises `MalformedMessageError`."""
        if self.content_type == JSON_CONTENT_TYPE:
            return decode_json(data, message_type)
        return decode(data, message_type)

    @property
    def headers(self) -> Headers:
        """Headers that name the format."""
        return {CONTENT_TYPE: self.content_type}


JSON = WireFormat(JSON_CONTENT_TYPE)
MSGPACK = WireFormat(MSGPACK_CONTENT_TYPE)


class ClaimCheckError(Exception):
    """A payload too large for a message could not be stored or fetched; the text gives the reason."""


class ClaimCheck:
    """Claim checks: stores payloads that are too large for a message in Redis."""

    def __init__(self, bus: Bus, redis: StoreConnection | None) -> None:
        self._bus = bus
        self._redis = redis

    @property
    def max_bytes(self) -> int:
        """Largest size of a message."""
        return self._bus.connection.client.max_payload - HEADER_ALLOWANCE_BYTES

    @property
    def is_possible(self) -> bool:
        """True if Redis is available."""
        return self._redis is not None

    async def put(self, run: str, data: bytes) -> str:
        """Stores `data` for a limited time and returns its reference; raises `ClaimCheckError`."""
        try:
            return await self._blobs(run).put(data, BLOB_TTL_S)
        except StoreError as error:
            raise ClaimCheckError(str(error)) from error

    async def get(self, run: str, ref: str) -> bytes:
        """Returns the data of a reference; raises `ClaimCheckError`."""
        try:
            return await self._blobs(run).get(ref)
        except (StoreError, BlobGoneError) as error:
            raise ClaimCheckError(str(error)) from error

    def _blobs(self, run: str) -> Blobs:
        if self._redis is None:
            raise ClaimCheckError(
                "a payload too large for NATS needs Redis, and none is configured (redis_url)"
            )
        return Blobs(self._redis, run or _SHARED)


@dataclass(frozen=True)
class ReplyTo:
    """Reply subject and format of a caller. An empty subject: the caller expects no reply."""

    subject: str
    format: WireFormat


class Replies:
    """Replies of a worker: acceptances, results, refusals."""

    def __init__(self, bus: Bus, claims: ClaimCheck) -> None:
        self._bus = bus
        self._claims = claims

    async def send(self, to: ReplyTo, message: object) -> None:
        """Sends a message of any type."""
        if to.subject:
            data = to.format.encode(message)
            await self._bus.connection.publish(to.subject, data, headers=to.format.headers)

    async def result(self, to: ReplyTo, result: ToolResult, run: str) -> None:
        """Sends a result; a content too large for a message goes to Redis."""
        data = to.format.encode(result)
        if len(data) > self._claims.max_bytes:
            data = to.format.encode(await self._put_aside(result, run))
        await self._bus.connection.publish(to.subject, data, headers=to.format.headers)

    async def refuse(
        self, to: ReplyTo, code: CallErrorCode, reason: str, retry_after_s: float = 0.0
    ) -> None:
        """Refuses a request."""
        if to.subject:
            headers = error_headers(CallFailedError(code, reason, retry_after_s))
            await self._bus.connection.publish(to.subject, b"", headers=headers)

    async def _put_aside(self, result: ToolResult, run: str) -> ToolResult:
        content = result.content.encode()
        call = CallTool(result.call_id, result.name)
        if not self._claims.is_possible:
            remedy = " by a worker that has no Redis"
            return too_large(call, len(content), self._claims.max_bytes, remedy)
        try:
            ref = await self._claims.put(run, content)
        except ClaimCheckError as error:
            return infra_result(call, f"cannot keep the result: {error}")
        return msgspec.structs.replace(result, content="", content_blob=ref)
