"""Tool messages as bytes: JSON or msgpack by the `Content-Type` header, big texts by claim check.

A reply has the form of its request. Our own callers send JSON, which every language can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tailrace.bus import Bus
from tailrace.bus.connection import HEADER_ALLOWANCE_BYTES, Headers
from tailrace.store import BlobGoneError, Blobs, StoreConnection, StoreError
from tailrace_protos.base import (
    JSON_CONTENT_TYPE,
    MSGPACK_CONTENT_TYPE,
    decode,
    decode_json,
    encode,
    encode_json,
)

CONTENT_TYPE = "Content-Type"
BLOB_TTL_S = 900.0
_SHARED = "tools"  # whose payloads those are that belong to no run

M = TypeVar("M")


class Form(msgspec.Struct, frozen=True):
    """How one peer writes."""

    content_type: str

    @classmethod
    def of(cls, headers: Mapping[str, str] | None) -> Form:
        """What a message's headers say; msgpack if they say nothing."""
        kind = (headers or {}).get(CONTENT_TYPE, MSGPACK_CONTENT_TYPE).partition(";")[0].strip()
        return JSON if kind.lower() == JSON_CONTENT_TYPE else MSGPACK

    def encode(self, message: object) -> bytes:
        """A message's bytes."""
        return encode_json(message) if self.content_type == JSON_CONTENT_TYPE else encode(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message in `data`; raises `MalformedMessageError`."""
        if self.content_type == JSON_CONTENT_TYPE:
            return decode_json(data, message_type)
        return decode(data, message_type)

    @property
    def headers(self) -> Headers:
        """What to send along."""
        return {CONTENT_TYPE: self.content_type}


JSON = Form(JSON_CONTENT_TYPE)
MSGPACK = Form(MSGPACK_CONTENT_TYPE)


class ClaimCheckError(Exception):
    """A payload too big for a message could not be put aside or fetched; the text says why."""


class ClaimCheck:
    """Puts aside what is too big for a message; without Redis it cannot."""

    def __init__(self, bus: Bus, redis: StoreConnection | None) -> None:
        self._bus = bus
        self._redis = redis

    @property
    def max_bytes(self) -> int:
        """How big a message may be."""
        return self._bus.connection.client.max_payload - HEADER_ALLOWANCE_BYTES

    @property
    def is_possible(self) -> bool:
        """Whether anything can be put aside."""
        return self._redis is not None

    async def put(self, run: str, data: bytes) -> str:
        """Keep `data` for a while and return its reference; raises `ClaimCheckError`."""
        try:
            return await self._blobs(run).put(data, BLOB_TTL_S)
        except StoreError as error:
            raise ClaimCheckError(str(error)) from error

    async def get(self, run: str, ref: str) -> bytes:
        """What is behind a reference; raises `ClaimCheckError`."""
        try:
            return await self._blobs(run).get(ref)
        except (StoreError, BlobGoneError) as error:
            raise ClaimCheckError(str(error)) from error

    def _blobs(self, run: str) -> Blobs:
        if self._redis is None:
            raise ClaimCheckError(
                "a payload too big for NATS needs Redis, and none was given (redis_url)"
            )
        return Blobs(self._redis, run or _SHARED)
