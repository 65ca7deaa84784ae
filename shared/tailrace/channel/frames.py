"""Frames: many messages in one piece on the wire, encoded where they arise.

A `FrameWriter` encodes each message straight into the frame being built, so sizes are exact, nothing
is kept twice, and a message that is too large is refused before anything was sent. Invariants: frames
leave in the order of their sequence numbers, no frame exceeds `max_bytes`, and none is empty unless
asked for. Readers survive any bytes: a message that cannot be read fails alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from tailrace.channel.credit import Credit
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.generation import (
    AbortRequest,
    ChunkFrame,
    GenerateRequest,
    RequestFrame,
    TokenChunk,
)

_HEAD = struct.Struct(">BQBQBI")  # uint64, uint64, array32: msgpack types of fixed width
_UINT64, _ARRAY32 = 0xCF, 0xDD
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", GenerateRequest | AbortRequest, TokenChunk)


Emit = Callable[[bytearray, int, bool], None]  # frame, number of messages, credit is exhausted by it


class FrameTooLargeError(ValueError):
    """One message of `num_bytes` does not fit into a frame; the writer is as before."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {num_bytes} bytes, a frame holds {limit_bytes}")
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class FrameWriter:
    """Builds the frames of one direction of one link and hands each to `emit`."""

    __slots__ = (
        "_buffer",
        "_count",
        "_credit",
        "_emit",
        "_max_bytes",
        "_prefix",
        "_start",
        "_target_bytes",
        "sequence",
    )

    def __init__(self, tag: str, target_bytes: int, max_bytes: int, credit: Credit, emit: Emit) -> None:
        # An array of four: tag, sequence, received, messages.
        self._prefix = b"\x94" + encode(tag) + b"\0" * _HEAD.size
        self._start = len(self._prefix)
        self._target_bytes = min(target_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._credit = credit
        self._emit = emit
        self._buffer = bytearray(self._prefix)
        self._count = 0
        self.sequence = 0  # of the next frame

    def __len__(self) -> int:
        """Messages in the frame being built."""
        return self._count

    def add(self, message: GenerateRequest | AbortRequest | TokenChunk) -> None:
        """Encode a message; emits full frames. Raises `FrameTooLargeError` if it can never fit."""
        buffer = self._buffer
        start = len(buffer)
        try:
            _encoder.encode_into(message, buffer, start)
        except (TypeError, ValueError, OverflowError):
            del buffer[start:]
            raise
        if len(buffer) > self._max_bytes:
            self._carry_over(start)
        self._count += 1
        if len(self._buffer) >= self._target_bytes:
            self.emit()

    def check(self, message: GenerateRequest | AbortRequest | TokenChunk) -> None:
        """Raise `FrameTooLargeError` if `add` would."""
        num_bytes = len(encode(message))
        if self._start + num_bytes > self._max_bytes:
            raise FrameTooLargeError(num_bytes, self._max_bytes - self._start)

    def _carry_over(self, start: int) -> None:
        """Move the message at `start` into a frame of its own."""
        message = self._buffer[start:]
        del self._buffer[start:]
        num_bytes = self._start + len(message)
        if num_bytes > self._max_bytes:
            raise FrameTooLargeError(len(message), self._max_bytes - self._start)
        if self._count:
            self.emit()
        self._buffer += message

    def emit(self) -> None:
        """Send the frame being built, even if it is empty."""
        buffer, count = self._buffer, self._count
        head = (_UINT64, self.sequence, _UINT64, self._credit.received, _ARRAY32, count)
        _HEAD.pack_into(buffer, self._start - _HEAD.size, *head)
        self.sequence += 1
        self._buffer = bytearray(self._prefix)
        self._count = 0
        self._emit(buffer, count, self._credit.on_sent(len(buffer)))


class BadMessage(msgspec.Struct, frozen=True):
    """A message inside a good frame that could not be read; `call_id` is empty if unreadable too."""

    call_id: str
    reason: str


class Envelope(msgspec.Struct, Generic[M], frozen=True):
    """A frame as read: the messages that could be, and those that could not."""

    sequence: int
    received: int
    messages: tuple[M, ...]
    bad: tuple[BadMessage, ...] = ()
    closing: bool = False
    broken: str = ""


class _RawFrame(msgspec.Struct, frozen=True, array_like=True):
    tag: str
    sequence: int
    received: int = 0
    messages: tuple[msgspec.Raw, ...] = ()


class _CallIdOnly(msgspec.Struct, frozen=True):
    call_id: str = ""


_request_decoder = msgspec.msgpack.Decoder(RequestFrame)
_chunk_decoder = msgspec.msgpack.Decoder(ChunkFrame)
_request_message_decoder: msgspec.msgpack.Decoder[GenerateRequest | AbortRequest] = (
    msgspec.msgpack.Decoder(GenerateRequest | AbortRequest)
)
_chunk_message_decoder = msgspec.msgpack.Decoder(TokenChunk)


def read_request_frame(data: bytes) -> Envelope[GenerateRequest | AbortRequest]:
    """Decode what a client sent; raises `MalformedMessageError` if it is no frame at all."""
    try:
        frame = _request_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raw = _read_raw(data, "request_frame", error)
        messages, bad = _read_one_by_one(raw, _request_message_decoder)
        return Envelope(raw.sequence, raw.received, messages, bad)
    return Envelope(frame.sequence, frame.received, frame.messages, (), frame.closing)


def read_chunk_frame(data: bytes) -> Envelope[TokenChunk]:
    """Decode what a server sent; raises `MalformedMessageError` if it is no frame at all."""
    try:
        frame = _chunk_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raw = _read_raw(data, "chunk_frame", error)
        messages, bad = _read_one_by_one(raw, _chunk_message_decoder)
        return Envelope(raw.sequence, raw.received, messages, bad)
    return Envelope(frame.sequence, frame.received, frame.messages, (), False, frame.broken)


def _read_raw(data: bytes, tag: str, cause: Exception) -> _RawFrame:
    """The frame around unread messages; if there is none, the first error was about the frame."""
    try:
        raw = decode(data, _RawFrame)
    except MalformedMessageError as error:
        raise MalformedMessageError(tag, len(data), str(cause)) from error
    if raw.tag != tag:
        raise MalformedMessageError(tag, len(data), f"it is tagged {raw.tag!r}")
    return raw


def _read_one_by_one(
    raw: _RawFrame, decoder: msgspec.msgpack.Decoder[M]
) -> tuple[tuple[M, ...], tuple[BadMessage, ...]]:
    messages: list[M] = []
    bad: list[BadMessage] = []
    for data in raw.messages:
        try:
            messages.append(decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append(BadMessage(_call_id_of(data), str(error)))
    return tuple(messages), tuple(bad)


def _call_id_of(data: msgspec.Raw) -> str:
    try:
        return decode(bytes(data), _CallIdOnly).call_id
    except MalformedMessageError:
        return ""
