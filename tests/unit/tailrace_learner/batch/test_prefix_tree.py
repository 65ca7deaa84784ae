"""Trees of shared prefixes: which tokens occur once, and that every row is still there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace_learner.core.batch.prefix_tree import (
    MIN_SHARED_TOKENS,
    Forest,
    PrefixSegment,
    lone_rows,
    share,
)

Tokens = NDArray[np.int64]


def laid_out(forest: Forest, rows: list[Tokens]) -> Tokens:
    """The flat tokens."""
    return np.concatenate([rows[source][start:stop] for source, start, stop, _ in forest.segments])


def read_back(forest: Forest, rows: list[Tokens], row: int) -> Tokens:
    """The row's tokens, along its path."""
    path = [forest.segments[index] for index in forest.path(row)]
    parts = [rows[source][start:stop] for source, start, stop, _ in path]
    return np.concatenate(parts)[: len(rows[row])]


def tokens(*parts: object) -> Tokens:
    return np.concatenate([np.atleast_1d(np.asarray(part)) for part in parts]).astype(np.int64)


PROMPT = np.arange(100, 120)


def test_a_prompt_that_all_rows_begin_with_occurs_once() -> None:
    rows = [tokens(PROMPT, answer, np.arange(answer)) for answer in (3, 1, 2)]
    forest = share(rows)
    assert forest.segments[0] == PrefixSegment(1, 0, 20, -1)
    assert [segment.parent for segment in forest.segments] == [-1, 0, 0, 0]
    assert len(laid_out(forest, rows)) == 20 + 4 + 2 + 3
    assert forest.ends.tolist() == [4, 2, 3, 4]


def test_turns_of_an_episode_need_no_more_than_the_last_one() -> None:
    episode = np.arange(50)
    rows = [episode[:12], episode[:31], episode, episode[:31]]
    forest = share(rows)
    assert forest.segments == (PrefixSegment(2, 0, 50, -1),)
    assert forest.last == (0, 0, 0, 0)


def test_forks_of_a_conversation_branch_where_they_part() -> None:
    first, second = np.arange(200, 210), np.arange(300, 312)
    rows = [
        tokens(PROMPT, first, 1),
        tokens(PROMPT, first, 2, 2),
        tokens(PROMPT, second),
        tokens(PROMPT, second, 5),
        PROMPT[:15],
    ]
    forest = share(rows)
    assert forest.segments == (
        PrefixSegment(0, 0, 20, -1),
        PrefixSegment(0, 20, 30, 0),
        PrefixSegment(0, 30, 31, 1),
        PrefixSegment(1, 30, 32, 1),
        PrefixSegment(3, 20, 33, 0),
    )
    assert forest.last == (2, 3, 4, 4, 0)


def test_a_few_common_tokens_are_not_worth_a_branch() -> None:
    few = np.arange(MIN_SHARED_TOKENS - 1)
    rows = [tokens(few, 50, 51), tokens(few, 60)]
    assert share(rows).segments == (PrefixSegment(1, 0, 8, -1), PrefixSegment(0, 0, 9, -1))
    enough = np.arange(MIN_SHARED_TOKENS)
    assert len(share([tokens(enough, 50), tokens(enough, 60)]).segments) == 3


def test_rows_that_differ_early_share_nothing_however_much_follows() -> None:
    rows = [tokens(1, PROMPT), tokens(2, PROMPT)]
    assert share(rows) == lone_rows(rows)


def test_token_ids_are_compared_whole() -> None:
    rows = [tokens(PROMPT, 1), tokens(PROMPT[:10], PROMPT[10] + 256, PROMPT[11:], 1)]
    assert share(rows).segments[0].stop == 10


def forests() -> st.SearchStrategy[list[Tokens]]:
    """Rows made of few different pieces, so that they often agree for long."""
    pieces = [np.full(size, token) for size in (1, 5, 9) for token in (0, 1)]
    row = st.lists(st.sampled_from(pieces), min_size=1, max_size=6).map(np.concatenate)
    return st.lists(row.map(lambda array: array.astype(np.int64)), min_size=1, max_size=8)


@given(forests())
@settings(max_examples=150, deadline=None)
def test_every_row_can_be_read_along_its_path_and_no_long_prefix_is_doubled(rows: list[Tokens]) -> None:
    forest = share(rows)
    for index, row in enumerate(rows):
        assert read_back(forest, rows, index).tolist() == row.tolist()
    for index, segment in enumerate(forest.segments):
        assert segment.parent < index < forest.ends[index]
        assert segment.start < segment.stop
        if segment.parent >= 0:
            assert forest.segments[segment.parent].stop == segment.start
    for left, right in itertools.combinations(forest.segments, 2):
        if left.parent == right.parent:
            assert _agree_for(rows, left, right) < MIN_SHARED_TOKENS


def _agree_for(rows: list[Tokens], left: PrefixSegment, right: PrefixSegment) -> int:
    """Number of tokens that siblings share at their beginnings."""
    pair = zip(
        rows[left.source][left.start : left.stop],
        rows[right.source][right.start : right.stop],
        strict=False,
    )
    return len(list(itertools.takewhile(lambda two: two[0] == two[1], pair)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_order_of_rows_changes_no_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [tokens(PROMPT[: 8 + 4 * (i % 3)], rng.integers(0, 5, 6 + i)) for i in range(9)]
    shuffled = [rows[index] for index in rng.permutation(9)]
    assert laid_out(share(shuffled), shuffled).tolist() == laid_out(share(rows), rows).tolist()
