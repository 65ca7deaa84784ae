"""Spans of a generation call: queue, prefill, decode."""

import time

from tailrace.tracing import record
from tailrace_inference.ports import OnChunk
from tailrace_protos.generation import GenerateRequest, TokenChunk


def traced(request: GenerateRequest, on_chunk: OnChunk) -> OnChunk:
    """`on_chunk`, which also records the spans of the call at its last chunk.

    Decoding begins when the first tokens arrive, at most one chunk interval after they were sampled.
    An engine that does not report `queue_s` counts the wait for a place as prefill.
    """
    begun = time.time()
    first = 0.0
    num_tokens = 0

    def forward(chunk: TokenChunk) -> None:
        nonlocal first, num_tokens
        on_chunk(chunk)
        now = time.time()
        if len(chunk.token_ids):
            first = first or now
            num_tokens += len(chunk.token_ids) // 4
        if chunk.finish_reason is None and chunk.error is None:
            return
        generate = record(
            "generate",
            request.traceparent,
            begun,
            now,
            call_id=request.call_id,
            finish_reason=chunk.finish_reason.value if chunk.finish_reason else "error",
            num_prompt_tokens=len(request.prompt_ids) // 4,
            num_cached_tokens=chunk.num_cached_tokens,
            num_sampled_tokens=num_tokens,
            policy_version=chunk.spans[-1].policy_version if chunk.spans else -1,
        )
        admitted = begun + max(0.0, chunk.queue_s)
        if chunk.queue_s >= 0:
            record("queue", generate, begun, admitted)
        if first:
            record("prefill", generate, admitted, first)
            record("decode", generate, first, now)

    return forward
