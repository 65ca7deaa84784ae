"""Encoding of messages on the wire: msgpack maps, an explicit tag, raw arrays.

Long numeric arrays travel as raw little-endian bytes and are read as numpy views without a copy;
a view keeps the message it came from alive. Unknown fields are accepted, new fields have defaults.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

# A field of these types holds the raw little-endian bytes of a one-dimensional array.
Int32Bytes = memoryview
Int64Bytes = memoryview
Float32Bytes = memoryview
UInt8Bytes = memoryview

EMPTY = memoryview(b"")

# Numbers that a message may hold; `decode` refuses others by the name of the field. Encoding does not
# check: the receiver is the boundary.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # also an index or an offset
PolicyVersion = Annotated[int, msgspec.Meta(ge=-2, le=2**53)]  # -1: none yet; -2: `GIVEN_VERSION`
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")

JSON_CONTENT_TYPE = "application/json"
MSGPACK_CONTENT_TYPE = "application/msgpack"


class Message(msgspec.Struct, frozen=True):
    """Base of all that crosses a process border; subclasses write their tag explicitly."""


M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


class MalformedMessageError(ValueError):
    """A payload that is no valid message of the expected type.

    Attributes: `expected` (type name), `num_bytes` (payload size), `reason` (what did not fit).
    """

    def __init__(self, expected: str, num_bytes: int, reason: str) -> None:
        super().__init__(f"malformed {expected} ({num_bytes} bytes): {reason}")
        self.expected = expected
        self.num_bytes = num_bytes
        self.reason = reason


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message; the last one is for values nested too deeply."""

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.msgpack.Decoder(message_type)
    return decoder


def encode(message: object) -> bytes:
    """msgpack bytes of a message or of a list of messages."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, message_type: type[M]) -> M:
    """The message in `data`; raises `MalformedMessageError` when it is not one of `message_type`."""
    try:
        message: M = _decoder(message_type).decode(data)
    except UNREADABLE as error:
        name = getattr(message_type, "__name__", str(message_type))
        raise MalformedMessageError(name, len(data), str(error)) from error
    return message


def encode_json(message: object) -> bytes:
    """JSON bytes of a message without raw arrays (events, status, tool payloads)."""
    return _json_encoder.encode(message)


def decode_json(data: bytes | memoryview, message_type: type[M]) -> M:
    """As `decode` for JSON bytes."""
    try:
        return msgspec.json.decode(data, type=message_type)
    except UNREADABLE as error:
        name = getattr(message_type, "__name__", str(message_type))
        raise MalformedMessageError(name, len(data), str(error)) from error


def pack_int32(values: Sequence[int] | NDArray[np.int32]) -> Int32Bytes:
    """Raw bytes of integer values [T]; no copy when they already are a contiguous int32 array."""
    return np.ascontiguousarray(values, dtype=_INT32).data.cast("B") if len(values) else EMPTY


def copy_int32(values: NDArray[np.int32]) -> Int32Bytes:
    """Copies values [T] as raw bytes. The garbage collector tracks views, but not `bytes`."""
    return values.tobytes()  # type: ignore[return-value]


def copy_float32(values: NDArray[np.float32]) -> Float32Bytes:
    """As `copy_int32` for float values [T]."""
    return values.tobytes()  # type: ignore[return-value]


def pack_int64(values: Sequence[int] | NDArray[np.int64]) -> Int64Bytes:
    """Raw bytes of integer values [T] that need 64 bits (hashes)."""
    return np.ascontiguousarray(values, dtype=_INT64).data.cast("B") if len(values) else EMPTY


def pack_float32(values: Sequence[float] | NDArray[np.float32]) -> Float32Bytes:
    """Raw bytes of float values [T]; no copy when they already are a contiguous float32 array."""
    return np.ascontiguousarray(values, dtype=_FLOAT32).data.cast("B") if len(values) else EMPTY


def pack_uint8(values: Sequence[int] | NDArray[np.uint8]) -> UInt8Bytes:
    """Raw bytes of small integers [T] (masks)."""
    return np.ascontiguousarray(values, dtype=np.uint8).data.cast("B") if len(values) else EMPTY


def as_int32(raw: Int32Bytes) -> NDArray[np.int32]:
    """Read-only int32 view [T] of raw bytes, without a copy."""
    return np.frombuffer(raw, _INT32)


def as_int64(raw: Int64Bytes) -> NDArray[np.int64]:
    """Read-only int64 view [T] of raw bytes, without a copy."""
    return np.frombuffer(raw, _INT64)


def as_float32(raw: Float32Bytes) -> NDArray[np.float32]:
    """Read-only float32 view [T] of raw bytes, without a copy."""
    return np.frombuffer(raw, _FLOAT32)


def as_uint8(raw: UInt8Bytes) -> NDArray[np.uint8]:
    """Read-only uint8 view [T] of raw bytes, without a copy."""
    return np.frombuffer(raw, dtype=np.uint8)
