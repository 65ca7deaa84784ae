"""Token spans joined, cut and picked from: each token keeps its version and its source."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.channel.generation import Generation
from tailrace.provenance import covers_trained_tokens, cut_spans, join_spans, kept_spans
from tailrace_protos.base import pack_uint8
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.trajectory import TokenRow
from tests.provenance import sources_of, versions_of

SPANS = st.lists(
    st.builds(TokenSpan, st.integers(1, 3), st.sampled_from(["", "a#1", "b#1"]), st.integers(0, 6)),
    max_size=8,
)


def tokens_of(spans: tuple[TokenSpan, ...]) -> list[tuple[int, str]]:
    """Version and source of each token; fails where neighbours could be one span."""
    assert all(span.num_tokens > 0 for span in spans)
    assert all(a != b for a, b in itertools.pairwise(map(_fields, spans)))
    return expanded(spans)


def expanded(spans: tuple[TokenSpan, ...]) -> list[tuple[int, str]]:
    return list(zip(versions_of(spans), sources_of(spans), strict=True))


def _fields(span: TokenSpan) -> tuple[int, str]:
    return span.policy_version, span.source


@given(SPANS)
def test_joined_spans_say_the_same_of_every_token(spans: list[TokenSpan]) -> None:
    assert tokens_of(join_spans(spans)) == expanded(tuple(spans))


@given(SPANS, st.integers(0, 20), st.integers(0, 20))
def test_cut_spans_are_those_of_the_slice(spans: list[TokenSpan], start: int, count: int) -> None:
    expected = expanded(tuple(spans))[start : start + count]
    assert tokens_of(cut_spans(spans, start, start + count)) == expected


@given(SPANS, st.randoms(use_true_random=False))
def test_kept_spans_are_those_of_the_kept_tokens(spans: list[TokenSpan], random: Random) -> None:
    tokens = expanded(tuple(spans))
    is_kept = np.array([random.random() < 0.7 for _ in tokens], np.bool_)
    expected = list(itertools.compress(tokens, is_kept))
    assert tokens_of(kept_spans(spans, is_kept)) == expected


@pytest.mark.parametrize("keep", [True, False])
def test_all_tokens_may_be_kept_or_none(keep: bool) -> None:
    spans = (TokenSpan(1, "a#1", 2), TokenSpan(2, "a#1", 1))
    assert kept_spans(spans, np.full(3, keep)) == (spans if keep else ())


@pytest.mark.parametrize(
    ("counts", "covers"), [((2,), True), ((1, 1), True), ((1,), False), ((3,), False), ((3, -1), False)]
)
def test_spans_cover_the_trained_tokens_and_no_others(counts: tuple[int, ...], covers: bool) -> None:
    spans = tuple(TokenSpan(1, "", count) for count in counts)
    row = TokenRow(loss_mask=pack_uint8([0, 1, 0, 1]), spans=spans)
    assert covers_trained_tokens(row) is covers
    assert not covers_trained_tokens(TokenRow(loss_mask=row.loss_mask))
    assert covers_trained_tokens(TokenRow(loss_mask=pack_uint8([0, 0])))


def test_neighbours_of_one_version_stay_apart_when_two_servers_sampled_them() -> None:
    spans = (TokenSpan(1, "a", 2), TokenSpan(1, "b", 1), TokenSpan(1, "b", 2))
    assert join_spans(spans) == (TokenSpan(1, "a", 2), TokenSpan(1, "b", 3))


def test_a_generation_takes_the_source_that_its_caller_knows() -> None:
    generation = Generation(
        np.zeros(2, np.int32),
        np.zeros(2, np.float32),
        (TokenSpan(1, "", 2),),
        FinishReason.STOP,
        None,
        0,
    )
    assert generation.sampled_by("c").spans == (TokenSpan(1, "c", 2),)
