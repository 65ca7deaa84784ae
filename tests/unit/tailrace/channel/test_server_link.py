"""A server's link over a wire made of a list, and the chunks of its calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.channel.config import SERVER_DEFAULTS, ServerChannelConfig
from tailrace.channel.frames import read_chunk_frame
from tailrace.channel.generation import TokenBuffer, merge_chunks, split_chunk
from tailrace.channel.ports import LinkLoss
from tailrace.channel.server_link import CallSink, ServerCalls, ServerLink
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, TokenChunk, TokenSpan
from tests.provenance import versions_of


@dataclass
class ListWire:
    """Keeps the frames of a link."""

    max_frame_bytes: int = 1 << 20
    frames: list[bytes] = field(default_factory=list)
    closed: bool = False

    def send(self, frame: bytearray) -> None:
        self.frames.append(bytes(frame))

    def close(self) -> None:
        self.closed = True

    @property
    def chunks(self) -> list[TokenChunk]:
        return [chunk for frame in self.frames for chunk in read_chunk_frame(frame).messages]


@dataclass
class OpenLink:
    """A link with one call, "c"."""

    config: ServerChannelConfig = SERVER_DEFAULTS
    wire: ListWire = field(default_factory=ListWire)
    lost: list[tuple[LinkLoss, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = ServerCalls()
        self.link = ServerLink(
            "peer",
            self.config,
            self.calls,
            lambda _peer, _link: self.wire,
            lambda _link, cause, detail: self.lost.append((cause, detail)),
        )
        self.sink = self.link.calls["c"] = CallSink("c", self.link)
        self.calls.begin(self.sink)


def chunk(start: int, count: int, version: int = 1, finish: FinishReason | None = None) -> TokenChunk:
    ids = np.arange(start, start + count, dtype=np.int32)
    spans = (TokenSpan(version, "", count),) if count else ()
    return TokenChunk("c", pack_int32(ids), pack_float32(ids.astype(np.float32)), spans, finish)


async def test_what_is_sent_in_one_tick_is_one_chunk() -> None:
    made = OpenLink()
    for start in range(0, 320, 32):
        made.sink.send(chunk(start, 32))
    assert made.wire.chunks == []
    await asyncio.sleep(0)
    (sent,) = made.wire.chunks
    assert as_int32(sent.token_ids).tolist() == list(range(320))
    assert sent.spans == (TokenSpan(1, "", 320),)
    made.sink.send(chunk(320, 1, finish=FinishReason.STOP))
    await asyncio.sleep(0)
    assert [one.finish_reason for one in made.wire.chunks] == [None, FinishReason.STOP]
    assert made.calls.by_id == {}
    assert made.link.calls == {}


async def test_a_slow_client_lets_chunks_grow_and_none_is_lost() -> None:
    made = OpenLink(ServerChannelConfig(max_unconfirmed_bytes=64))
    for index in range(10):
        made.sink.send(chunk(index, 1, finish=FinishReason.STOP if index == 9 else None))
        await asyncio.sleep(0)
    assert len(made.wire.chunks) == 1
    made.link.take(10, confirmed=1)
    await asyncio.sleep(0)
    first, second = made.wire.chunks
    assert as_int32(first.token_ids).tolist() == [0]
    assert as_int32(second.token_ids).tolist() == list(range(1, 10))
    assert second.finish_reason is FinishReason.STOP


async def test_a_frame_that_confirms_nothing_gives_no_credit() -> None:
    made = OpenLink(ServerChannelConfig(max_unconfirmed_bytes=64))
    for index in range(3):
        made.sink.send(chunk(index, 1))
        await asyncio.sleep(0)
    made.link.take(10, confirmed=0)
    await asyncio.sleep(0)
    assert len(made.wire.chunks) == 1


async def test_nothing_follows_the_last_chunk() -> None:
    made = OpenLink()
    made.sink.send(chunk(0, 1, finish=FinishReason.STOP))
    made.sink.send(chunk(1, 8))
    made.sink.fail(CallErrorCode.INTERNAL, "late")
    await asyncio.sleep(0)
    (sent,) = made.wire.chunks
    assert as_int32(sent.token_ids).tolist() == [0]
    assert sent.error is None


async def test_a_muted_call_still_reports_its_end() -> None:
    made = OpenLink()
    made.sink.muted = True
    made.sink.send(chunk(0, 4))
    made.sink.send(chunk(4, 1, finish=FinishReason.ABORT))
    await asyncio.sleep(0)
    assert made.wire.frames == []
    assert made.calls.by_id == {}


async def test_an_error_keeps_the_tokens_before_it() -> None:
    made = OpenLink()
    made.sink.send(chunk(0, 2))
    made.sink.fail(CallErrorCode.NOT_READY, "draining", 2.0)
    await asyncio.sleep(0)
    (sent,) = made.wire.chunks
    assert as_int32(sent.token_ids).tolist() == [0, 1]
    assert sent.error is not None
    assert (sent.error.code, sent.error.retry_after_s) == (CallErrorCode.NOT_READY, 2.0)


async def test_a_chunk_that_fits_into_no_frame_ends_the_link() -> None:
    made = OpenLink()
    made.sink.fail(CallErrorCode.INTERNAL, "x" * (2 << 20))
    await asyncio.sleep(0)
    assert made.lost
    assert made.lost[0][0] is LinkLoss.MALFORMED


async def test_a_chunk_that_cannot_be_encoded_ends_the_link_and_keeps_no_other_waiting() -> None:
    made = OpenLink()
    other = made.link.calls["d"] = CallSink("d", made.link)
    made.sink.fail(CallErrorCode.INTERNAL, "a lone \ud800")
    other.send(chunk(0, 1))
    await asyncio.sleep(0)
    assert [cause for cause, _ in made.lost] == [LinkLoss.MALFORMED]
    other.send(chunk(1, 1))
    await asyncio.sleep(0)
    tokens = [token for sent in made.wire.chunks for token in as_int32(sent.token_ids).tolist()]
    assert tokens == [0, 1]


SPANS = st.lists(st.builds(TokenSpan, st.integers(1, 3), st.just(""), st.integers(0, 6)), max_size=8)


@given(SPANS, st.integers(1, 7))
def test_splitting_and_merging_keep_every_token_with_its_version(
    spans: list[TokenSpan], size: int
) -> None:
    versions = versions_of(spans)
    ids = np.arange(len(versions), dtype=np.int32)
    whole = TokenChunk(
        "c", pack_int32(ids), pack_float32(ids.astype(np.float32)), tuple(spans), FinishReason.LENGTH
    )
    if not versions:
        return
    pieces = split_chunk(whole, size)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert all(len(piece.token_ids) <= 4 * size for piece in pieces)
    ledger = TokenBuffer()
    for piece in pieces:
        assert ledger.add(piece) == ""
    merged = merge_chunks(pieces)
    for generation in (ledger.generation(), None):
        got_ids = as_int32(merged.token_ids) if generation is None else generation.token_ids
        got_spans = merged.spans if generation is None else generation.spans
        assert got_ids.tolist() == ids.tolist()
        assert versions_of(got_spans) == versions
    assert merged.finish_reason is FinishReason.LENGTH


def test_a_chunk_whose_parts_do_not_match_is_named_and_not_added() -> None:
    ledger = TokenBuffer()
    good = chunk(0, 2)
    assert ledger.add(good) == ""
    short = TokenChunk("c", good.token_ids, good.inference_logprobs[:4], good.spans)
    unversioned = TokenChunk("c", good.token_ids, good.inference_logprobs)
    assert "8 bytes of ids with 4" in ledger.add(short)
    assert "2 tokens with versions for 0" in ledger.add(unversioned)
    assert ledger.generation().token_ids.tolist() == [0, 1]
