"""Which process sampled which of a row's tokens, in few words: most rows have one source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import ServerSpan


def server_spans(sampled: Sequence[TokenSpan], is_trained: NDArray[np.bool_]) -> tuple[ServerSpan, ...]:
    """The sources of those sampled tokens [S] that are trained; none if no source is known."""
    sampled = [span for span in sampled if span.num_tokens]
    first = sampled[0].source if sampled else ""
    if all(span.source == first for span in sampled):
        num_trained = int(np.count_nonzero(is_trained))
        return (ServerSpan(first, num_trained),) if first and num_trained else ()
    counts = np.add.reduceat(
        is_trained.astype(np.int64),
        np.cumsum([0, *(span.num_tokens for span in sampled[:-1])]),
    )
    return joined(
        ServerSpan(span.source, count) for span, count in zip(sampled, counts.tolist(), strict=True)
    )


def joined(spans: Iterable[ServerSpan]) -> tuple[ServerSpan, ...]:
    """The same spans, neighbours of one source made one, empty ones left out."""
    found: list[ServerSpan] = []
    for span in spans:
        if span.num_tokens and found and found[-1].source == span.source:
            span = ServerSpan(span.source, found.pop().num_tokens + span.num_tokens)
        if span.num_tokens:
            found.append(span)
    return tuple(found)


def cut(spans: Sequence[ServerSpan], start: int, stop: int) -> tuple[ServerSpan, ...]:
    """The spans of trained tokens `start` to `stop`, counted as the spans count them."""
    parts: list[ServerSpan] = []
    begin = 0
    for span in spans:
        end = begin + span.num_tokens
        parts.append(ServerSpan(span.source, max(0, min(end, stop) - max(begin, start))))
        begin = end
    return joined(parts)
