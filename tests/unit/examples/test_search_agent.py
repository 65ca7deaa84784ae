"""The search agent: its tool, its corpus and its questions."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.data import DatasetEntry, load_dataset

FOLDER = Path(__file__).parents[3] / "examples" / "search_agent_32b_64gpu"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("SEARCH_CORPUS", raising=False)
    import search_tool

    search_tool.corpus.cache_clear()
    yield search_tool
    search_tool.corpus.cache_clear()


def test_every_question_is_answered_by_the_first_passage_of_a_search(example: Any) -> None:
    questions = {}
    for split in ("train", "test"):
        entry = DatasetEntry(path="questions:rows", split=split, columns={"prompt": "question"})
        rows = load_dataset(entry, 0, "agents.datasets.questions").rows
        questions[split] = {row.data["prompt"]: row.data["answer"] for row in rows}
    assert not questions["train"].keys() & questions["test"].keys()
    assert len(questions["test"]) == 48
    for question, answer in (questions["train"] | questions["test"]).items():
        (_, text), *_ = example.corpus().find(question, 1)
        assert answer in text


async def test_the_tool_shows_passages_of_a_corpus_of_the_users(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.jsonl"
    rows = [{"title": "Zeppelin", "text": "A rigid airship."}, {"text": "Boats " + "float " * 500}]
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("SEARCH_CORPUS", str(path))
    example = importlib.reload(example)
    path.unlink()  # a worker has read it before its first call
    assert await example.search("an airship?") == "[1] Zeppelin: A rigid airship."
    assert len(await example.search("float")) < 650
    assert await example.search("submarine") == "nothing found"
