"""Tool `search`: the passages of a corpus that fit a query best, by BM25.

The environment variable `SEARCH_CORPUS` names the corpus, JSON lines with `title` and `text` (name the
variable in `cluster.keep_environment`). Without it, the tool searches the facts of `questions.py`.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import bm25s
from questions import passages

from tailrace.sdk import tool

_NUM_PASSAGES = 3
_MAX_CHARS = 600  # of one passage in an answer


class Corpus:
    """Passages with their index."""

    def __init__(self, entries: list[tuple[str, str]]) -> None:
        """`entries`: title and text of each passage."""
        self._entries = entries
        self._index: Any = bm25s.BM25()
        self._index.index([_words(f"{title} {text}") for title, text in entries], show_progress=False)

    def find(self, query: str, num_passages: int) -> list[tuple[str, str]]:
        """Returns the passages with the highest scores; none without a word of the query."""
        known = [word for word in _words(query) if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = scores.argsort(kind="stable")[::-1][:num_passages]
        return [self._entries[number] for number in best if scores[number] > 0]


@cache
def corpus() -> Corpus:
    """Reads and indexes the corpus, once in a process."""
    path = os.environ.get("SEARCH_CORPUS")
    if not path:
        return Corpus(passages())
    with Path(path).open(encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        return Corpus([(str(row.get("title", "")), str(row["text"])) for row in rows])


@tool(is_idempotent=True, timeout_s=20.0)
async def search(query: str) -> str:
    """Search an encyclopedia; returns the passages that fit best.

    Args:
        query: Words to search for.
    """
    found = corpus().find(query, _NUM_PASSAGES)
    shown = (
        f"[{number}] {title}: {text[:_MAX_CHARS]}" for number, (title, text) in enumerate(found, 1)
    )
    return "\n".join(shown) or "nothing found"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


corpus()  # now: in the first call it would block the worker, which is then taken for dead
