"""Sampled ids to text as they arrive: whole characters only, without the token that ends the turn.

Invariants: what was given is never taken back; all pieces together are the text of all ids at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # how a decoder writes bytes that are no character, or none yet


class TokenText:
    """`dropped_ids` are left out of the text. A last id of `end_ids` is no part of the reply."""

    def __init__(
        self, tokenizer: Tokenizer, dropped_ids: frozenset[int], end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._dropped_ids = dropped_ids
        self._end_ids = end_ids
        self._held_end: int | None = None
        self._context: list[int] = []  # given already; decoders look at the neighbours of a token
        self._fresh: list[int] = []
        self._num_given = 0  # characters of context and fresh ids that were given; -1: all, uncounted

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        ids = list(token_ids) if self._held_end is None else [self._held_end, *token_ids]
        self._held_end = ids.pop() if ids and ids[-1] in self._end_ids else None
        fresh = [token_id for token_id in ids if token_id not in self._dropped_ids]
        if not (fresh or self._fresh):
            return ""
        if self._num_given < 0:  # counted only now: most replies come whole
            self._num_given = len(self._decode())
        self._fresh += fresh
        text = self._decode()
        certain = text.rstrip(_INCOMPLETE)
        delta = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if certain == text:
            self._context, self._fresh = self._fresh, []
            self._num_given = -1
        return delta

    def finish(self) -> str:
        """The rest: bytes that never became a character are written as U+FFFD."""
        return self._decode()[self._num_given :] if self._fresh else ""

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._context + self._fresh, skip_special_tokens=False))


class StopText:
    """Cuts text where a stop string begins and holds back what may become one."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> str:
        """The text that no stop string can claim any more."""
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
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def first_possible(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Where the first marker at or after `start` begins, or may begin with text still to come."""
    found = [at for marker in markers if (at := text.find(marker, start)) >= 0]
    partial = [
        len(text) - size
        for marker in markers
        for size in range(min(len(marker) - 1, len(text) - start), 0, -1)
        if text.endswith(marker[:size])
    ]
    return min(*found, *partial, len(text)) if found or partial else len(text)
