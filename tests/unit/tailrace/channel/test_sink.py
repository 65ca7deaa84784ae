from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.channel.generation import TokenLedger
from tailrace.channel.sink import CallSink, merge, split
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, TokenChunk, TokenSpan
from tests.provenance import versions_of


@dataclass
class FakeLink:
    """Writes down what a sink asks for."""

    congested: bool = False
    scheduled: list[CallSink] = field(default_factory=list)
    lingering: list[CallSink] = field(default_factory=list)
    done: list[CallSink] = field(default_factory=list)

    def schedule(self, sink: CallSink) -> None:
        self.scheduled.append(sink)

    def linger(self, sink: CallSink) -> None:
        self.lingering.append(sink)

    def on_done(self, sink: CallSink) -> None:
        self.done.append(sink)


def chunk(start: int, count: int, version: int = 1, finish: FinishReason | None = None) -> TokenChunk:
    ids = np.arange(start, start + count, dtype=np.int32)
    spans = (TokenSpan(version, "", count),) if count else ()
    return TokenChunk("c", pack_int32(ids), pack_float32(ids.astype(np.float32)), spans, finish)


def test_tokens_wait_until_there_are_enough() -> None:
    link = FakeLink()
    sink = CallSink("c", link, 4)
    for index in range(3):
        sink.send(chunk(index, 1))
    assert link.scheduled == []
    assert link.lingering == [sink]
    sink.send(chunk(3, 1))
    assert link.scheduled == [sink]
    (sent,) = sink.take()
    assert as_int32(sent.token_ids).tolist() == [0, 1, 2, 3]
    assert sent.spans == (TokenSpan(1, "", 4),)


def test_the_last_chunk_does_not_wait() -> None:
    link = FakeLink()
    sink = CallSink("c", link, 1000)
    sink.send(chunk(0, 1))
    sink.send(chunk(1, 1, finish=FinishReason.STOP))
    assert link.scheduled == [sink]
    assert link.done == [sink]
    (sent,) = sink.take()
    assert sent.finish_reason is FinishReason.STOP
    assert as_int32(sent.token_ids).tolist() == [0, 1]


def test_everything_sent_in_one_tick_is_one_chunk() -> None:
    link = FakeLink()
    sink = CallSink("c", link, 32)
    for start in range(0, 320, 32):
        sink.send(chunk(start, 32))
    assert link.scheduled == [sink]
    assert len(sink.take()) == 1
    sink.send(chunk(320, 32))
    assert link.scheduled == [sink, sink]


def test_a_slow_client_lets_chunks_grow_and_none_is_lost() -> None:
    link = FakeLink(congested=True)
    sink = CallSink("c", link, 4)
    for index in range(10):
        sink.send(chunk(index, 1, finish=FinishReason.STOP if index == 9 else None))
    sink.on_interval()
    assert link.scheduled == []
    assert link.lingering == [sink, sink]
    link.congested = False
    sink.on_interval()
    assert link.scheduled == [sink]
    (sent,) = sink.take()
    assert as_int32(sent.token_ids).tolist() == list(range(10))


def test_nothing_follows_the_last_chunk() -> None:
    link = FakeLink()
    sink = CallSink("c", link, 4)
    sink.send(chunk(0, 1, finish=FinishReason.STOP))
    sink.take()
    sink.send(chunk(1, 8))
    sink.fail(CallErrorCode.INTERNAL, "late")
    assert sink.take() == []
    assert link.done == [sink]


def test_a_muted_call_still_reports_its_end() -> None:
    link = FakeLink()
    sink = CallSink("c", link, 1)
    sink.muted = True
    sink.send(chunk(0, 4))
    sink.send(chunk(4, 1, finish=FinishReason.ABORT))
    assert (link.scheduled, link.done) == ([], [sink])


def test_an_error_keeps_the_tokens_before_it() -> None:
    sink = CallSink("c", FakeLink(), 100)
    sink.send(chunk(0, 2))
    sink.fail(CallErrorCode.NOT_READY, "draining", 2.0)
    (sent,) = sink.take()
    assert as_int32(sent.token_ids).tolist() == [0, 1]
    assert sent.error is not None
    assert (sent.error.code, sent.error.retry_after_s) == (CallErrorCode.NOT_READY, 2.0)


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
    pieces = split(whole, size)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert all(len(piece.token_ids) <= 4 * size for piece in pieces)
    ledger = TokenLedger()
    for piece in pieces:
        assert ledger.add(piece) == ""
    merged = merge(pieces)
    for generation in (ledger.generation(), None):
        got_ids = as_int32(merged.token_ids) if generation is None else generation.token_ids
        got_spans = merged.spans if generation is None else generation.spans
        assert got_ids.tolist() == ids.tolist()
        assert versions_of(got_spans) == versions
    assert merged.finish_reason is FinishReason.LENGTH


def test_a_chunk_whose_parts_do_not_match_is_named_and_not_added() -> None:
    ledger = TokenLedger()
    good = chunk(0, 2)
    assert ledger.add(good) == ""
    short = TokenChunk("c", good.token_ids, good.inference_logprobs[:4], good.spans)
    unversioned = TokenChunk("c", good.token_ids, good.inference_logprobs)
    assert "8 bytes of ids with 4" in ledger.add(short)
    assert "2 tokens with versions for 0" in ledger.add(unversioned)
    assert ledger.generation().token_ids.tolist() == [0, 1]
