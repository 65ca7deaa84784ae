"""Two attempts at one outside episode in one worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tailrace.store.sessions import OutsideProgress
from tailrace_agents.adapters.outside_desk import StoredDesk
from tailrace_protos.session import OutsideResult


class Store:
    """Progress of all episodes: leased, and rewarded once there is a `result`."""

    def __init__(self) -> None:
        self.result: OutsideResult | None = None

    async def progress(self, episode_ids: list[str]) -> dict[str, OutsideProgress]:
        return dict.fromkeys(episode_ids, OutsideProgress(7.0, False, self.result))


async def test_an_attempt_that_ends_leaves_the_other_one_its_wait() -> None:
    desk, store = StoredDesk(), Store()
    made: Any = store
    desk.connect(made)
    first = asyncio.create_task(desk.result_of("g0.0", lambda _: None))
    seen: list[float | None] = []
    second = asyncio.create_task(desk.result_of("g0.0", seen.append))
    async with asyncio.timeout(60):
        while 7.0 not in seen:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        store.result = OutsideResult(rewards={"": 1.0})
        assert await second == (7.0, store.result)
    await desk.close()
