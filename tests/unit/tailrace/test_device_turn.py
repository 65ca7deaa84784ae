"""Turns of a learner and servers on one device; each has descriptors of its own, as processes have."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tailrace.device_turn import DeviceTurn


async def ends(task: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=0.1)
    return bool(done)


async def test_servers_share_the_device_and_the_learner_has_it_alone(tmp_path: Path) -> None:
    learner = DeviceTurn(tmp_path, "host", "learner")
    servers = [DeviceTurn(tmp_path, "host", "server") for _ in range(2)]
    for server in servers:
        await asyncio.wait_for(server.take(), 60)
    noticed = [asyncio.create_task(server.wanted()) for server in servers]
    assert not await ends(noticed[0])
    taking = asyncio.create_task(learner.take())
    await asyncio.wait_for(asyncio.gather(*noticed), 60)
    servers[0].give()
    assert not await ends(taking), "a server still has the device"
    servers[1].give()
    await asyncio.wait_for(taking, 60)
    again = [asyncio.create_task(server.take()) for server in servers]
    assert not await ends(again[0])
    learner.give()
    await asyncio.wait_for(asyncio.gather(*again), 60)


async def test_a_server_that_asks_again_waits_behind_the_learner(tmp_path: Path) -> None:
    learner = DeviceTurn(tmp_path, "host", "learner")
    early, late = (DeviceTurn(tmp_path, "host", "server") for _ in range(2))
    await early.take()
    taking = asyncio.create_task(learner.take())
    await asyncio.wait_for(early.wanted(), 60)
    joining = asyncio.create_task(late.take())
    assert not await ends(joining), "servers could hold the device for ever"
    early.give()
    await asyncio.wait_for(taking, 60)
    assert not joining.done()
    await learner.aclose()
    await asyncio.wait_for(joining, 60)


async def test_the_turn_of_a_dead_process_is_over_and_hosts_are_apart(tmp_path: Path) -> None:
    server = DeviceTurn(tmp_path, "host", "server")
    await server.take()
    await asyncio.wait_for(DeviceTurn(tmp_path, "other", "learner").take(), 60)
    learner = DeviceTurn(tmp_path, "host", "learner")
    taking = asyncio.create_task(learner.take())
    assert not await ends(taking)
    await server.aclose()  # as the kernel does for a killed process
    await asyncio.wait_for(taking, 60)
