"""Spans of a generation call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace import tracing
from tailrace.tracing import FinishedSpan, Sink
from tailrace_inference.adapters.call_trace import traced
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = GenerateRequest("c1", "e1", pack_int32([1, 2, 3]), 8, traceparent=PARENT)


@pytest.fixture
def spans() -> Iterator[list[FinishedSpan]]:
    found: list[FinishedSpan] = []
    tracing.add_sink(Sink(found.append, lambda: None))
    yield found
    tracing.close()


def test_a_call_has_its_wait_prefill_and_decoding_in_order(spans: list[FinishedSpan]) -> None:
    passed: list[TokenChunk] = []
    forward = traced(REQUEST, passed.append)
    chunks = [
        TokenChunk("c1", pack_int32([4, 5]), spans=(TokenSpan(7, "", 2),)),
        TokenChunk(
            "c1",
            pack_int32([6]),
            spans=(TokenSpan(8, "", 1),),
            finish_reason=FinishReason.STOP,
            queue_s=0.0,
        ),
    ]
    for chunk in chunks:
        forward(chunk)
    assert passed == chunks
    generate, queue, prefill, decode = spans
    assert (generate.name, generate.parent) == ("generate", PARENT)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert {span.parent for span in (queue, prefill, decode)} == {generate.traceparent}
    assert queue.start_ns == generate.start_ns
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert decode.end_ns == generate.end_ns
    assert generate.attributes["num_prompt_tokens"] == 3
    assert generate.attributes["num_sampled_tokens"] == 3
    assert generate.attributes["policy_version"] == 8


def test_a_refused_call_has_no_parts(spans: list[FinishedSpan]) -> None:
    error = CallError(CallErrorCode.OVERLOADED, "full")
    traced(REQUEST, lambda _: None)(TokenChunk("c1", error=error))
    assert [span.name for span in spans] == ["generate"]
    assert spans[0].attributes["finish_reason"] == "error"
