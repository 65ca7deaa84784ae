"""Token spans in tests: made from one version per token, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.provenance import join_spans
from tailrace_protos.generation import TokenSpan


def spans_of(versions: Iterable[int], source: str = "") -> tuple[TokenSpan, ...]:
    """Spans of sampled tokens [S] with these policy versions, all of one server."""
    return join_spans(TokenSpan(int(version), source, 1) for version in versions)


def versions_of(spans: Iterable[TokenSpan]) -> list[int]:
    """Policy version of each sampled token [S]."""
    return [span.policy_version for span in spans for _ in range(span.num_tokens)]


def sources_of(spans: Iterable[TokenSpan]) -> list[str]:
    """Source of each sampled token [S]."""
    return [span.source for span in spans for _ in range(span.num_tokens)]
