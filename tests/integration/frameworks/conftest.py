"""The world of workflows, with the examples' modules at hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.workflows.conftest import world

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"

__all__ = ["world"]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every example's folder on the path, as `tailrace train` has the one that it runs."""
    folders = [str(folder) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("_agent"):
            del sys.modules[name]
