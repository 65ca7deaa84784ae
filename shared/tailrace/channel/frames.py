"""Frames, each with many messages, and the credit of a link.

A `FrameWriter` encodes each message directly into the current frame: sizes are exact, nothing is stored
twice, and a message that is too large is refused before anything is sent. Invariants: frames leave in
the order of their sequence numbers; no frame exceeds `max_bytes`; an empty frame leaves only on
request. Readers accept any bytes: a malformed message fails alone.

Credit limits the bytes in flight to a peer that has not confirmed them. Without it the frames of a slow
reader pile up where no caller can wait for them: nats-server disconnects a client that is 64 MiB
behind, and a socket's buffers only move the problem. Each frame carries the number of frames received
from the other side, so most confirmations cost nothing.
"""

import struct
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from tailrace_protos.base import UNREADABLE, MalformedMessageError, decode, encode
from tailrace_protos.generation import (
    AbortRequest,
    ChunkFrame,
    GenerateRequest,
    ReleasePrefixes,
    RequestFrame,
    TokenChunk,
)

_HEAD = struct.Struct(">BQBQBI")  # uint64, uint64, array32: msgpack types of fixed width
_UINT64, _ARRAY32 = 0xCF, 0xDD
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RequestFrame)
_chunk_decoder = msgspec.msgpack.Decoder(ChunkFrame)
ClientMessage = GenerateRequest | AbortRequest | ReleasePrefixes
_request_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    ClientMessage
)
_chunk_message_decoder = msgspec.msgpack.Decoder(TokenChunk)

M = TypeVar("M", ClientMessage, TokenChunk)
Emit = Callable[[bytearray, int, bool], None]  # frame, number of messages, frame exhausts credit


class Credit:
    """Credit of one link, both ways; exhausted from `max_bytes` unconfirmed down to half of it."""

    __slots__ = (
        "_max_bytes",
        "_num_confirmed",
        "_owed_bytes",
        "_unconfirmed",
        "exhausted",
        "num_bytes",
        "received",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unconfirmed: deque[int] = deque()  # sizes of frames sent
        self._num_confirmed = 0
        self._owed_bytes = 0  # received since the last confirmation
        self.num_bytes = 0  # sent and not confirmed
        self.received = 0  # frames received = sequence number of the next one
        self.exhausted = False

    def on_sent(self, num_bytes: int) -> bool:
        """Counts a sent frame, which also confirms; returns True when it exhausts the credit."""
        self._owed_bytes = 0
        self._unconfirmed.append(num_bytes)
        self.num_bytes += num_bytes
        if self.exhausted or self.num_bytes < self._max_bytes:
            return False
        self.exhausted = True
        return True

    def on_received(self, num_bytes: int, confirmed: int) -> None:
        """Counts the next received frame; the peer has received `confirmed` frames of this side."""
        self.received += 1
        self._owed_bytes += num_bytes
        unconfirmed = self._unconfirmed
        while self._num_confirmed < confirmed and unconfirmed:
            self._num_confirmed += 1
            self.num_bytes -= unconfirmed.popleft()
        if self.num_bytes <= self._max_bytes // 2:
            self.exhausted = False

    @property
    def owes_confirmation(self) -> bool:
        """True if the peer needs a confirmation now, in an empty frame if need be."""
        return self._owed_bytes * 4 >= self._max_bytes


class FrameTooLargeError(ValueError):
    """Message of `num_bytes` that does not fit into a frame; the writer is unchanged."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {num_bytes} bytes, a frame holds {limit_bytes}")
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class FrameWriter:
    """Builds the frames of one direction of a link and passes each to `emit`."""

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
        """Number of messages in the current frame."""
        return self._count

    def add(self, message: ClientMessage | TokenChunk) -> None:
        """Encodes a message; emits full frames. Raises `FrameTooLargeError` if it can never fit."""
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

    def check(self, message: ClientMessage | TokenChunk) -> None:
        """Raises `FrameTooLargeError` if `add` would."""
        num_bytes = len(encode(message))
        if self._start + num_bytes > self._max_bytes:
            raise FrameTooLargeError(num_bytes, self._max_bytes - self._start)

    def _carry_over(self, start: int) -> None:
        """Moves the message at `start` into the next frame."""
        message = self._buffer[start:]
        del self._buffer[start:]
        num_bytes = self._start + len(message)
        if num_bytes > self._max_bytes:
            raise FrameTooLargeError(len(message), self._max_bytes - self._start)
        if self._count:
            self.emit()
        self._buffer += message

    def emit(self) -> None:
        """Sends the current frame, even an empty one."""
        buffer, count = self._buffer, self._count
        head = (_UINT64, self.sequence, _UINT64, self._credit.received, _ARRAY32, count)
        _HEAD.pack_into(buffer, self._start - _HEAD.size, *head)
        self.sequence += 1
        self._buffer = bytearray(self._prefix)
        self._count = 0
        self._emit(buffer, count, self._credit.on_sent(len(buffer)))


class BadMessage(msgspec.Struct, frozen=True):
    """Malformed message in a valid frame; `call_id` is empty if it is unreadable."""

    call_id: str
    reason: str


class Envelope(msgspec.Struct, Generic[M], frozen=True):
    """Decoded frame: the valid messages and the malformed ones."""

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


def read_request_frame(data: bytes) -> Envelope[ClientMessage]:
    """Decodes a client's frame; raises `MalformedMessageError` if the frame itself is invalid."""
    try:
        frame = _request_decoder.decode(data)
    except UNREADABLE as error:
        raw = _read_raw(data, "request_frame", error)
        messages, bad = _read_one_by_one(raw, _request_message_decoder)
        return Envelope(raw.sequence, raw.received, messages, bad)
    return Envelope(frame.sequence, frame.received, frame.messages, (), frame.closing)


def read_chunk_frame(data: bytes) -> Envelope[TokenChunk]:
    """Decodes a server's frame; raises `MalformedMessageError` if the frame itself is invalid."""
    try:
        frame = _chunk_decoder.decode(data)
    except UNREADABLE as error:
        raw = _read_raw(data, "chunk_frame", error)
        messages, bad = _read_one_by_one(raw, _chunk_message_decoder)
        return Envelope(raw.sequence, raw.received, messages, bad)
    return Envelope(frame.sequence, frame.received, frame.messages, (), False, frame.broken)


def _read_raw(data: bytes, tag: str, cause: Exception) -> _RawFrame:
    """Decodes a frame without its messages; raises `cause` if the frame itself is invalid."""
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
        except UNREADABLE as error:
            bad.append(BadMessage(_call_id_of(data), str(error)))
    return tuple(messages), tuple(bad)


def _call_id_of(data: msgspec.Raw) -> str:
    try:
        return decode(bytes(data), _CallIdOnly).call_id
    except MalformedMessageError:
        return ""
