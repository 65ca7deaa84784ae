"""Keys of `agents.channel`: changing one changes what a worker's connection to its servers does."""

from __future__ import annotations

import pytest

from tests.world.agents import AgentsWorld
from tests.world.channel_keys import CASES, NUM_CALLS, KeyCase, check_key, mute_server


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("case", CASES, ids=[case.key for case in CASES])
async def test_a_key_of_the_channel(world: AgentsWorld, case: KeyCase, is_changed: bool) -> None:
    server = await world.start_server("s0")
    if case.peer == "holding":
        server.hold_from_turn = 0
    async with mute_server(world) as mute:
        if case.peer == "mute":
            world.scheduler.addresses[:] = [mute]
        await world.start_agents(channel=case.section(is_changed), drain_s=0.1)
        await check_key(case, is_changed, lambda: world.admit(num_groups=1, group_size=NUM_CALLS))
