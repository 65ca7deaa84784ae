"""Keys of an experiment that the scheduler's hints and verdicts name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace_cli.experiment import SECTION_KINDS
from tailrace_cli.reference import entries, is_key

CORE = Path(__file__).parents[2] / "services" / "tailrace_scheduler" / "core"
SECTIONS = SECTION_KINDS.keys() - {"run"}
PLACE = re.compile(r"\{[^}]*\}")
DOTTED = re.compile(r"[a-z_]+(?:\.(?:\w+|\*))+")
PLAIN = re.compile(r"(?<![\w.*])[a-z]+(?:_[a-z]+)+(?![\w.*])")


def texts_of(name: str) -> Iterator[str]:
    """Texts of a module for users: its strings with a space or a dot that are no docstrings."""
    tree = ast.parse((CORE / name).read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and (" " in text or "." in text):
            yield PLACE.sub("", text)


def dotted_keys(name: str) -> list[str]:
    found = [key for text in texts_of(name) for key in DOTTED.findall(text)]
    return [key for key in found if key.split(".")[0] in SECTIONS and not key.endswith(".log")]


@pytest.mark.parametrize("name", ["hints.py", "untrained.py", "run_health.py"])
def test_keys_that_texts_name_are_in_the_reference(name: str) -> None:
    dotted = dotted_keys(name)
    assert len(dotted) >= 5
    assert [key for key in dotted if not is_key(key)] == []
    last = {entry.name.rpartition(".")[2] for entry in entries()}
    assert [word for text in texts_of(name) for word in PLAIN.findall(text) if word not in last] == []
