"""Time of the event loop, in the hand of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest


@pytest.fixture
async def jump_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the loop's clock on by seconds; it stands still otherwise, so nothing is late before."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()

    def jump(by_s: float) -> None:
        nonlocal now_s
        now_s += by_s

    monkeypatch.setattr(loop, "time", lambda: now_s)
    return jump
