"""A listing of workers ends with the answers, not with a time."""

from __future__ import annotations

import asyncio
from functools import partial

from nats.aio.msg import Msg

from tailrace.bus import Bus
from tailrace.sdk.tool import tool
from tailrace.tools.discovery import Discovery, WorkerInfo
from tailrace.tools.port import ToolPort
from tests.integration.tools.conftest import Serve
from tests.world.serving import eventually_async

NEVER_S = 3600.0
WAIT_S = 60.0


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def test_without_anyone_to_answer_it_ends_at_once(bus: Bus) -> None:
    got: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        await ToolPort(bus).gather(f"{bus.run}.nobody", NEVER_S, lambda data: bool(got.append(data)))
    assert got == []


async def test_every_answer_gives_time_for_the_next_and_silence_ends_it(bus: Bus) -> None:
    subject = f"{bus.run}.asked"
    got: list[bytes] = []
    seen = [asyncio.Event() for _ in range(3)]

    async def answer_after(place: int, message: Msg) -> None:
        if place:
            await seen[place - 1].wait()
        await message.respond(str(place).encode())

    for place in range(3):
        client = bus.connection.client
        await client.subscribe(subject, cb=partial(answer_after, place))

    def take(data: bytes) -> bool:
        got.append(data)
        seen[len(got) - 1].set()
        return False

    async with asyncio.timeout(WAIT_S):
        await ToolPort(bus).gather(subject, NEVER_S, take, stall_s=3.0)
    assert got == [b"0", b"1", b"2"]


async def test_the_whole_time_ends_answers_that_never_stop(bus: Bus) -> None:
    subject, answered, over = f"{bus.run}.flood", 0, asyncio.Event()

    async def flood(message: Msg) -> None:
        while not over.is_set():
            await message.respond(b"again")
            await asyncio.sleep(0)

    await bus.connection.client.subscribe(subject, cb=flood)

    def take(_data: bytes) -> bool:
        nonlocal answered
        answered += 1
        return False

    async with asyncio.timeout(WAIT_S):
        await ToolPort(bus).gather(subject, 0.5, take, stall_s=NEVER_S)
    over.set()
    assert answered > 0


async def test_a_listing_has_the_load_of_each_worker(bus: Bus, serve: Serve) -> None:
    first, second = await serve(add), await serve(add)
    discovery, workers = Discovery(ToolPort(bus), ""), list[WorkerInfo]()

    async def are_listed() -> bool:  # one that answers late is missing in one list
        found = await discovery.workers()
        workers[:] = (each for each in found if (each.metadata or {})["run"] == bus.run)
        ids = {(worker.metadata or {})["worker_id"] for worker in workers}
        return ids == {first.worker_id, second.worker_id}

    async def have_loads() -> bool:
        return {worker.id for worker in workers} <= set(await discovery.stats(workers))

    await eventually_async(are_listed, WAIT_S)
    await eventually_async(have_loads, WAIT_S)
    assert len(workers) == 2
