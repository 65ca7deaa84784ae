from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.channel.frames import (
    Credit,
    FrameTooLargeError,
    FrameWriter,
    read_chunk_frame,
    read_request_frame,
)
from tailrace_protos.base import MalformedMessageError, encode, pack_float32, pack_int32
from tailrace_protos.generation import (
    AbortRequest,
    ChunkFrame,
    FinishReason,
    GenerateRequest,
    RequestFrame,
    TokenChunk,
    TokenSpan,
)


def make_request(call_id: str, num_prompt: int) -> GenerateRequest:
    return GenerateRequest(call_id, "e", pack_int32(np.arange(num_prompt, dtype=np.int32)), 5)


def written(messages, target_bytes: int = 1000, max_bytes: int = 4000) -> list[bytes]:  # type: ignore[no-untyped-def]
    frames: list[bytes] = []
    writer = FrameWriter(
        "request_frame",
        target_bytes,
        max_bytes,
        Credit(10**9),
        lambda frame, *_: frames.append(bytes(frame)),
    )
    for message in messages:
        writer.add(message)
    if len(writer):
        writer.emit()
    return frames


@given(st.lists(st.integers(0, 900), max_size=40))
def test_messages_come_out_in_order_in_bounded_numbered_frames(sizes: list[int]) -> None:
    requests = [make_request(f"c{n}", size) for n, size in enumerate(sizes)]
    frames = written(requests)
    read = [read_request_frame(frame) for frame in frames]
    assert [message.call_id for frame in read for message in frame.messages] == [
        r.call_id for r in requests
    ]  # type: ignore[union-attr]
    assert [frame.sequence for frame in read] == list(range(len(frames)))
    assert all(len(frame) <= 4000 for frame in frames)
    assert all(frame.messages for frame in read)
    pairs = itertools.pairwise(frames)
    assert all(len(frame) >= 1000 or len(frame) + len(following) > 4000 for frame, following in pairs)


def test_a_frame_is_what_the_wire_contract_says() -> None:
    request, abort = make_request("c1", 3), AbortRequest(("c0",))
    (frame,) = written([request, abort])
    decoded = msgspec.msgpack.decode(frame, type=RequestFrame)
    assert encode(decoded) == encode(RequestFrame(0, 0, (request, abort)))


def test_a_message_that_cannot_fit_is_refused_and_leaves_the_writer_as_it_was() -> None:
    frames: list[bytes] = []
    writer = FrameWriter(
        "request_frame", 1000, 4000, Credit(10**9), lambda frame, *_: frames.append(bytes(frame))
    )
    writer.add(make_request("c1", 10))
    with pytest.raises(FrameTooLargeError) as raised:
        writer.add(make_request("big", 1000))
    assert raised.value.num_bytes > 4000 > raised.value.limit_bytes
    writer.add(make_request("c2", 10))
    writer.emit()
    messages = [m.call_id for frame in frames for m in read_request_frame(frame).messages]  # type: ignore[union-attr]
    assert messages == ["c1", "c2"]


def test_a_message_that_cannot_be_encoded_leaves_the_writer_as_it_was() -> None:
    frames: list[bytes] = []
    writer = FrameWriter(
        "request_frame", 1000, 4000, Credit(10**9), lambda frame, *_: frames.append(bytes(frame))
    )
    writer.add(make_request("c1", 10))
    with pytest.raises(TypeError):
        writer.add(GenerateRequest("bad", "e", pack_int32([1]), object()))  # type: ignore[arg-type]
    writer.emit()
    assert [m.call_id for m in read_request_frame(frames[0]).messages] == ["c1"]  # type: ignore[union-attr]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_type(data: bytes) -> None:
    for read in (read_request_frame, read_chunk_frame):
        try:
            read(data)
        except MalformedMessageError as error:
            assert error.num_bytes == len(data)  # noqa: PT017


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_frame_never_escapes_as_another_exception(position: int, value: int) -> None:
    damaged = bytearray(written([make_request("c1", 20), make_request("c2", 20)])[0])
    damaged[position % len(damaged)] = value
    try:
        read_request_frame(bytes(damaged))
    except MalformedMessageError as error:
        assert error.expected == "request_frame"  # noqa: PT017


def test_a_frame_for_the_other_side_is_refused() -> None:
    with pytest.raises(MalformedMessageError):
        read_chunk_frame(encode(RequestFrame(0)))
    with pytest.raises(MalformedMessageError):
        read_request_frame(encode(ChunkFrame(0)))


def test_one_unreadable_chunk_is_named_and_the_others_are_read() -> None:
    good = TokenChunk(
        "good", pack_int32([1]), pack_float32([-1.0]), (TokenSpan(1, "", 1),), FinishReason.STOP
    )
    bad = {"type": "token_chunk", "call_id": "bad", "finish_reason": "because"}
    frame = read_chunk_frame(encode(["chunk_frame", 3, 0, [good, bad, 17]]))
    assert [chunk.call_id for chunk in frame.messages] == ["good"]
    assert [message.call_id for message in frame.bad] == ["bad", ""]
    assert frame.sequence == 3
