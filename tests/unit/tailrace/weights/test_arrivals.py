"""Waits for chunks that have not arrived yet."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.weights.chunks import Holding

CHUNK_BYTES = 16


async def ticks(number: int) -> None:
    """Lets the loop go round so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_ticks", range(5))
async def test_a_wait_ends_with_its_cancellation_also_if_a_chunk_comes_at_that_time(
    num_ticks: int,
) -> None:
    holding = Holding(memoryview(bytearray(64)), complete=False, chunk_bytes=CHUNK_BYTES)

    async def serve() -> None:
        while not holding.is_complete:
            await holding.arrival(600.0)

    serving = asyncio.create_task(serve())
    await ticks(5)
    holding.write(0, memoryview(bytes(CHUNK_BYTES)))
    await ticks(num_ticks)
    serving.cancel()
    await ticks(10)
    assert serving.cancelled()
