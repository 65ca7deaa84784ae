"""Keys of `gateway.channel`: changing one changes what a gateway's connection to its servers does."""

from __future__ import annotations

import asyncio

import pytest

from tests.world.channel_keys import CASES, NUM_CALLS, KeyCase, check_key, mute_server
from tests.world.gateway import GatewayWorld

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("case", CASES, ids=[case.key for case in CASES])
async def test_a_key_of_the_channel(empty_world: GatewayWorld, case: KeyCase, is_changed: bool) -> None:
    world = empty_world
    world.model.hold = case.peer == "holding"
    calls: list[asyncio.Task[object]] = []
    async with mute_server(world) as mute:
        if case.peer == "mute":
            world.scheduler.addresses[:] = [mute]
        await world.start_gateway(channel=case.section(is_changed), drain_s=0.1)
        client = world.http(await world.open())

        async def begin() -> None:
            posts = (client.post("chat/completions", json=CHAT) for _ in range(NUM_CALLS))
            calls.extend(map(asyncio.create_task, posts))

        await check_key(case, is_changed, begin)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
