"""The likeliest tokens stay with the token that they belong to, however chunks are merged and cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.channel.call import GenerateCall
from tailrace.channel.generation import (
    Generation,
    TokenBuffer,
    join_top_logprobs,
    merge_chunks,
    split_chunk,
)
from tailrace.channel.top_logprobs import top_logprob_arrays
from tailrace_protos.base import EMPTY, as_int32, decode, encode, pack_float32, pack_int32
from tailrace_protos.generation import (
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)
from tests.unit.tailrace.channel.test_server_link import OpenLink


def chunk(
    start: int, count: int, width: int, finish: FinishReason | None = None, call_id: str = "c"
) -> TokenChunk:
    """Tokens `start`, `start + 1`, ...; the likeliest of token i are 100 i, 100 i + 1, ..."""
    ids = np.arange(start, start + count, dtype=np.int32)
    tops = (100 * ids[:, None] + np.arange(width)).astype(np.int32).flatten()
    return TokenChunk(
        call_id,
        pack_int32(ids),
        pack_float32(ids.astype(np.float32)),
        (TokenSpan(1, "", count),) if count else (),
        finish,
        top_ids=pack_int32(tops),
        top_logprobs=pack_float32(-tops.astype(np.float32)),
    )


def assert_aligned(generation: Generation, width: int) -> None:
    if not width or not generation.num_tokens:
        assert generation.top_ids is None
        assert generation.top_logprobs is None
        return
    assert generation.top_ids is not None
    assert generation.top_logprobs is not None
    expected = 100 * generation.token_ids[:, None] + np.arange(width)
    assert generation.top_ids.tolist() == expected.tolist()
    assert generation.top_logprobs.tolist() == (-expected).tolist()


def ledger_of(chunks: list[TokenChunk]) -> TokenBuffer:
    ledger = TokenBuffer()
    for one in chunks:
        assert ledger.add(decode(encode(one), TokenChunk)) == ""
    return ledger


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(1, 7),
    st.booleans(),
)
def test_merging_splitting_and_reading_on_keep_them_with_their_tokens(
    counts: list[int], width: int, size: int, ends_empty: bool
) -> None:
    ends = list(itertools.accumulate(counts))
    parts = [chunk(end - count, count, width) for end, count in zip(ends, counts, strict=True)]
    if ends_empty:
        parts.append(TokenChunk("c", finish_reason=FinishReason.STOP))
    merged = merge_chunks(parts)
    assert_aligned(ledger_of([merged]).generation(), width)
    pieces = split_chunk(merged, size)
    assert all(len(piece.token_ids) <= 4 * size for piece in pieces)
    ledger = ledger_of(pieces)
    assert_aligned(ledger.generation(), width)
    num_read = min(size, ledger.num_tokens)
    rest = ledger.since(num_read, 0, "c")
    top_ids, _ = top_logprob_arrays(rest)
    if width and num_read < ledger.num_tokens:
        assert top_ids is not None
        assert top_ids[:, 0].tolist() == (100 * as_int32(rest.token_ids)).tolist()
    else:
        assert top_ids is None


async def test_a_long_answer_with_many_goes_out_in_chunks_that_fit_into_a_frame() -> None:
    made = OpenLink()
    made.sink.send(chunk(0, 9_000, 20))
    made.sink.send(chunk(9_000, 500, 20, FinishReason.LENGTH))
    chunks = made.sink.take()
    assert len(chunks) > 1
    assert max(len(encode(one)) for one in chunks) < 1 << 20  # what nats-server takes by default
    generation = ledger_of(chunks).generation()
    assert generation.num_tokens == 9_500
    assert generation.finish_reason is FinishReason.LENGTH
    assert_aligned(generation, 20)


def test_chunks_without_them_send_no_byte_more() -> None:
    plain = merge_chunks([chunk(0, 2, 0), chunk(2, 1, 0)])
    assert b"top_" not in encode(plain)
    assert b"top_" in encode(merge_chunks([chunk(0, 2, 1), chunk(2, 1, 1)]))


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(2, 2, 2),
        chunk(2, 2, 0),
        TokenChunk("c", top_ids=pack_int32([1]), top_logprobs=pack_float32([0.0])),
        TokenChunk(
            "c",
            pack_int32([2]),
            pack_float32([0.0]),
            (TokenSpan(1, "", 1),),
            top_ids=pack_int32([1, 2, 3]),
            top_logprobs=EMPTY,
        ),
    ],
)
def test_a_chunk_with_another_number_of_them_is_named_and_not_added(wrong: TokenChunk) -> None:
    ledger = ledger_of([chunk(0, 2, 3)])
    assert "of 3 each" in ledger.add(wrong)
    assert_aligned(ledger.generation(), 3)


def test_a_call_that_began_without_them_takes_none_later() -> None:
    ledger = ledger_of([chunk(0, 2, 0)])
    assert "of 0 each" in ledger.add(chunk(2, 1, 3))
    assert ledger.generation().top_ids is None


async def test_a_reader_gets_them_with_the_tokens_that_are_new() -> None:
    call = GenerateCall(GenerateRequest("c", "e", pack_int32([1]), 9, top_logprobs=2), "s", print)
    assert call.feed(chunk(0, 2, 2))
    first = await anext(call)
    assert call.feed(chunk(2, 1, 2))
    assert call.feed(chunk(3, 1, 2, FinishReason.STOP))
    second = await anext(call)
    for got, ids in ((first, [0, 1]), (second, [2, 3])):
        top_ids, top_logprobs = top_logprob_arrays(got)
        assert top_ids is not None
        assert top_logprobs is not None
        assert top_ids.tolist() == [[100 * i, 100 * i + 1] for i in ids]
        assert top_logprobs.tolist() == (-top_ids).tolist()
    assert_aligned(call.partial(), 2)


def test_parts_of_which_one_lacks_them_have_none_together() -> None:
    whole, bare = ledger_of([chunk(0, 2, 2)]).generation(), ledger_of([chunk(2, 1, 0)]).generation()
    assert join_top_logprobs([whole, bare]) == (None, None)
    empty = ledger_of([TokenChunk("c", finish_reason=FinishReason.STOP)]).generation()
    top_ids, _ = join_top_logprobs([empty, whole])
    assert top_ids is not None
    assert top_ids.tolist() == [[0, 1], [100, 101]]
