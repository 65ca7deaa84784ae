"""Streams of text: sampled ids to whole characters, stop strings, and markers.

Invariants: text that was returned is never taken back. All pieces together are the text of all ids.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_MAX_HELD_IDS = 64  # more ids without a whole character hold bytes that are no text
_MAX_CHARACTER_IDS = 4  # a character has at most four bytes
_INCOMPLETE = "\ufffd"  # decoders write it for bytes that are not a (complete) character


class TokenText:
    """Text of sampled ids, without `dropped_ids` and without a last id of `end_ids`."""

    def __init__(
        self, tokenizer: Tokenizer, dropped_ids: frozenset[int], end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._dropped_ids = dropped_ids
        self._end_ids = end_ids
        self._held_end: int | None = None
        self._context: list[int] = []  # already returned; decoding a token depends on its neighbours
        self._fresh: list[int] = []
        self._num_given = 0  # returned characters of context and fresh ids; -1: all, not counted

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes newly sampled ids; returns the newly certain text."""
        ids = list(token_ids) if self._held_end is None else [self._held_end, *token_ids]
        self._held_end = ids.pop() if ids and ids[-1] in self._end_ids else None
        fresh = [token_id for token_id in ids if token_id not in self._dropped_ids]
        if not (fresh or self._fresh):
            return ""
        self._count_given()
        self._fresh += fresh
        certain, num_certain_ids = self._certain()
        delta = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if num_certain_ids:
            self._context = self._fresh[:num_certain_ids]
            self._fresh = self._fresh[num_certain_ids:]
            self._num_given = -1
        return delta

    def finish(self) -> str:
        """Returns the rest; incomplete characters become U+FFFD."""
        self._count_given()
        return self._decode()[self._num_given :] if self._fresh else ""

    def _count_given(self) -> None:
        if self._num_given < 0:  # counted only now, because most replies arrive at once
            self._num_given = len(self._decode(0))

    def _certain(self) -> tuple[str, int]:
        """Certain text of context and fresh ids; the number of fresh ids that are whole."""
        text, size = self._decode(), len(self._fresh)
        whole = text.rstrip(_INCOMPLETE)
        if whole == text:
            return text, size
        if size <= _MAX_HELD_IDS:
            return whole, 0
        for end in range(size - 1, size - _MAX_CHARACTER_IDS, -1):
            shorter = self._decode(end)
            if not shorter.endswith(_INCOMPLETE):
                return shorter, end
        return text, size

    def _decode(self, end: int | None = None) -> str:
        ids = self._context + self._fresh[:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class StopText:
    """Cuts text at a stop string and holds text back that may become one."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> str:
        """Takes text; returns the text that cannot be part of a stop string any more."""
        if not self._stop:
            return text
        if self._is_over:
            return ""
        text = self._held + text
        found = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if found >= 0:
            self._held, self._is_over = "", True
            return text[:found]
        certain = first_possible(text, self._stop)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held


def first_possible(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Start of the first marker at or after `start`, or of a beginning of one at the end of `text`."""
    pattern, longest = _searched(tuple(markers))
    found = pattern.search(text, start)
    first = found.start() if found else len(text)
    for at in range(max(start, len(text) - longest + 1), first):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return first


@lru_cache(256)
def _searched(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Pattern of any marker, and the length of the longest."""
    return re.compile("|".join(map(re.escape, markers))), max(map(len, markers))
