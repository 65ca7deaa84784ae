"""Arithmetic of token spans: the policy version and the server that sampled each token.

Invariant: a result has no empty span, and neighbours differ in policy version or source.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.base import as_uint8
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow


def join_spans(spans: Iterable[TokenSpan]) -> tuple[TokenSpan, ...]:
    """Merges neighbours of one version and one source; leaves empty spans out."""
    joined: list[TokenSpan] = []
    newest, num_tokens = None, 0
    for span in spans:
        if not span.num_tokens:
            continue
        if newest is None:
            newest, num_tokens = span, span.num_tokens
        elif newest.policy_version == span.policy_version and newest.source == span.source:
            num_tokens += span.num_tokens
        else:
            joined.append(_of_length(newest, num_tokens))
            newest, num_tokens = span, span.num_tokens
    return (*joined, _of_length(newest, num_tokens)) if newest is not None else ()


def _of_length(span: TokenSpan, num_tokens: int) -> TokenSpan:
    same = span.num_tokens == num_tokens
    return span if same else TokenSpan(span.policy_version, span.source, num_tokens)


def cut_spans(spans: Iterable[TokenSpan], start: int, stop: int) -> tuple[TokenSpan, ...]:
    """Spans of tokens `start` to `stop`, counted over the tokens of `spans`."""
    parts: list[TokenSpan] = []
    begin = 0
    for span in spans:
        end = begin + span.num_tokens
        overlap = max(0, min(end, stop) - max(begin, start))
        parts.append(TokenSpan(span.policy_version, span.source, overlap))
        begin = end
    return join_spans(parts)


def kept_spans(spans: Sequence[TokenSpan], is_kept: NDArray[np.bool_]) -> tuple[TokenSpan, ...]:
    """Spans of those tokens that `is_kept` [S] marks; the spans' numbers of tokens sum to S."""
    spans = [span for span in spans if span.num_tokens]
    if is_kept.all():
        return join_spans(spans)
    if not spans:
        return ()
    starts = np.cumsum([0, *(span.num_tokens for span in spans[:-1])])
    counts = np.add.reduceat(is_kept.astype(np.int64), starts)
    return join_spans(
        TokenSpan(span.policy_version, span.source, count)
        for span, count in zip(spans, counts.tolist(), strict=True)
    )


def covers_trained_tokens(row: TokenRow) -> bool:
    """True if the spans of a row cover its tokens with `loss_mask` 1 and no others."""
    counts = [span.num_tokens for span in row.spans]
    return min(counts, default=0) >= 0 and sum(counts) == int(np.count_nonzero(as_uint8(row.loss_mask)))
