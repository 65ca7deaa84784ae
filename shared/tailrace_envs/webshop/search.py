"""The shop's search engine: BM25 by bm25s over `Product.text`. At least one text must have a word."""

from __future__ import annotations

import re
from collections.abc import Sequence

import bm25s
import numpy as np

_WORD = re.compile(r"[^\W_]+(?:\.[0-9]+)?")


class SearchIndex:
    """Finds texts by words. Equal scores are in the order of the texts, so results never change."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = bm25s.BM25()
        self._bm25.index([words_of(text) for text in texts], show_progress=False)
        self._known = set(self._bm25.vocab_dict)

    def find(self, query: str, max_results: int) -> list[int]:
        """Numbers of the texts that have any of the words, best first."""
        words = [word for word in words_of(query) if word in self._known]
        if not words:
            return []
        scores = np.asarray(self._bm25.get_scores(words))
        found = np.flatnonzero(scores > 0)
        order = np.argsort(-scores[found], kind="stable")[:max_results]
        return [int(number) for number in found[order]]


def words_of(text: str) -> list[str]:
    """Words and numbers, in lower case."""
    return _WORD.findall(text.lower())
