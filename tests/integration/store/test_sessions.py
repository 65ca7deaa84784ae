"""Claims of calls in a session, on a real Redis."""

from __future__ import annotations

import asyncio

from tailrace.store import SessionLogs, StoreConnection


async def test_a_call_is_answered_by_who_claimed_it_until_it_lets_go(
    redis: StoreConnection, run_name: str
) -> None:
    logs = SessionLogs(redis, run_name)
    assert await logs.claim("s", "call", "a", 60.0) == "a"
    assert await logs.claim("s", "call", "b", 60.0) == "a"
    assert await logs.claim("s", "another call", "b", 60.0) == "b"
    await logs.unclaim("s", "call", "b")
    assert await logs.claim("s", "call", "b", 60.0) == "a"
    await logs.unclaim("s", "call", "a")
    assert await logs.claim("s", "call", "b", 60.0) == "b"


async def test_a_claim_whose_holder_died_runs_out(redis: StoreConnection, run_name: str) -> None:
    logs = SessionLogs(redis, run_name)
    assert await logs.claim("s", "call", "dead", 0.05) == "dead"
    async with asyncio.timeout(20.0):
        while await logs.claim("s", "call", "alive", 60.0) != "alive":
            await asyncio.sleep(0.01)
