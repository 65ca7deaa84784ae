"""Tests that need a CUDA device: `make test-gpu`. Elsewhere each is skipped, and says why."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without a device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
