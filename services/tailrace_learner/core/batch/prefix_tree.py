"""Trees of segments for rows whose tokens begin alike: a shared prefix occurs once.

A causal model's states at a token depend only on the tokens up to it. Rows that agree up to a place
have the same states up to there: rows of a group share their prompt, turns of an episode their
history. Invariants: a row is the path from a root to its segment, cut at the row's length. Segments
are in preorder, so all that continues a segment follows it directly, and shortest first where none is
continued. Tokens are compared exactly. The order of the rows and of their arrival changes no tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.integer[Any]]

# A branch costs an attention of its own: fewer tokens than these are computed again instead.
MIN_SHARED_TOKENS = 8


class PrefixSegment(NamedTuple):
    """Tokens `start` to `stop` of row `source`, which every row through it has."""

    source: int
    start: int
    stop: int
    parent: int  # -1: a root


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments in preorder, and each row's last one."""

    segments: tuple[PrefixSegment, ...]
    last: tuple[int, ...]  # [rows] segment in which the row ends

    @property
    def starts(self) -> NDArray[np.int64]:
        """Place [segments + 1] of each segment's first token when all are laid out in order."""
        return np.cumsum([0, *(segment.stop - segment.start for segment in self.segments)])

    @property
    def ends(self) -> NDArray[np.int64]:
        """Segment [segments] after the last one that continues this one."""
        ends = np.arange(1, len(self.segments) + 1)
        for index in range(len(self.segments) - 1, -1, -1):
            parent = self.segments[index].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return ends

    def path(self, row: int) -> list[int]:
        """Segments of the row, from its root."""
        found = [self.last[row]]
        while (parent := self.segments[found[-1]].parent) >= 0:
            found.append(parent)
        return found[::-1]


def alike(rows: Sequence[TokenIds]) -> tuple[list[int], list[int]]:
    """Rows in lexicographic order, and the number of tokens each has in common with the one before."""
    keys = [row.astype(">u8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0, *(_common(rows[left], rows[right]) for left, right in pairwise(order))]
    return order, common[: len(rows)]


def _common(left: TokenIds, right: TokenIds) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def runs(common: Sequence[int], begin: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours from `begin` to `end` that share enough beyond `depth` to share a segment."""
    start = begin
    for place in range(begin + 1, end + 1):
        if place == end or common[place] < depth + MIN_SHARED_TOKENS:
            yield start, place
            start = place


def least_shared(common: int) -> int:
    """Least number of tokens that a row shares with its lexicographic neighbour, of `common` ones."""
    return max(0, common - MIN_SHARED_TOKENS + 1) if common >= MIN_SHARED_TOKENS else 0


def lone_rows(rows: Sequence[TokenIds]) -> Forest:
    """Every row by itself, in the given order."""
    segments = tuple(PrefixSegment(index, 0, len(row), -1) for index, row in enumerate(rows))
    return Forest(segments, tuple(range(len(rows))))


def share(rows: Sequence[TokenIds]) -> Forest:
    """Builds the trees of all `rows`. A row that another one continues has no segment of its own."""
    order, common = alike(rows)
    kept, kept_common, holders = _without_beginnings(rows, order, common)
    segments: list[PrefixSegment] = []
    leaves: list[int] = []
    # A stack of (begin, end, depth, parent): these rows agree beyond `depth`; the last one is next.
    waiting = [(begin, end, 0, -1) for begin, end in runs(kept_common, 0, len(kept), 0)][::-1]
    while waiting:
        begin, end, depth, parent = waiting.pop()
        source, index = kept[begin], len(segments)
        if end - begin == 1:
            segments.append(PrefixSegment(source, depth, len(rows[source]), parent))
            leaves.append(index)  # leaves come in the order of `kept`
            continue
        stop = min(kept_common[begin + 1 : end])
        segments.append(PrefixSegment(source, depth, stop, parent))
        found = [(left, right, stop, index) for left, right in runs(kept_common, begin, end, stop)]
        waiting += reversed(found)
    last = [_segment_at(segments, leaves[holders[row]], len(rows[row])) for row in range(len(rows))]
    if len(segments) == len(leaves):  # no segment is continued
        return _shortest_first(segments, last)
    return Forest(tuple(segments), tuple(last))


def _shortest_first(roots: Sequence[PrefixSegment], last: Sequence[int]) -> Forest:
    """Trees of one segment each, in the order in which attention takes rows by themselves."""
    order = sorted(range(len(roots)), key=lambda index: roots[index].stop)
    places = {index: place for place, index in enumerate(order)}
    return Forest(tuple(roots[index] for index in order), tuple(places[index] for index in last))


def _without_beginnings(
    rows: Sequence[TokenIds], order: Sequence[int], common: Sequence[int]
) -> tuple[list[int], list[int], dict[int, int]]:
    """Rows that no other one continues, the length that each shares with the one before, and paths.

    The path of a row is its place among the kept rows.
    """
    kept: list[int] = []
    kept_common: list[int] = []
    holders: dict[int, int] = {}
    shared, is_kept = 0, True
    for place, row in enumerate(order):
        holders[row] = len(kept)
        shared = common[place] if is_kept else min(shared, common[place])
        is_kept = place + 1 == len(order) or common[place + 1] < len(rows[row])
        if is_kept:
            kept.append(row)
            kept_common.append(shared)
    return kept, kept_common, holders


def _segment_at(segments: Sequence[PrefixSegment], leaf: int, size: int) -> int:
    """Segment on the leaf's path that holds token `size - 1`."""
    while segments[leaf].start >= size:
        leaf = segments[leaf].parent
    return leaf
