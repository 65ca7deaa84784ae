"""`transport: broadcast` with receivers in the test; `tests/contract/weights` has processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tailrace.bus import Bus
from tailrace.weights import WeightPublisher, WeightReceiver
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess
from tests.integration.weight_sync.test_relays import Servers, large
from tests.integration.weight_sync.test_weight_sync import newest_with, same
from tests.world.serving import eventually


@pytest.fixture
async def publisher(
    bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> AsyncIterator[WeightPublisher]:
    weight_sync.kill()
    weight_sync.configure(", transport: broadcast, broadcast_timeout_s: 20.0")
    weight_sync.start()
    made = WeightPublisher(bus, run_name, HOST_ID)
    yield made
    await made.close()


async def fetched(
    receivers: list[WeightReceiver], policy_version: int, seed: int, weight_sync: WeightSyncProcess
) -> None:
    """All of them fetch a version at once, and get its bytes; returns when weight_sync is done, too."""
    available = await newest_with(receivers[0], policy_version)
    num_ended = _num_ended(weight_sync)
    async with asyncio.timeout(60):
        staged = await asyncio.gather(*(each.fetch(available) for each in receivers))
    assert all(same(each, large(seed)) for each in staged)
    assert not any(isinstance(each.buffer.obj, bytearray) for each in staged)
    await eventually(lambda: _num_ended(weight_sync) > num_ended)


def _num_ended(weight_sync: WeightSyncProcess) -> int:
    """Number of broadcasts that weight_sync has ended, well or not."""
    events = [json.loads(line).get("event", "") for line in weight_sync.log.splitlines()]
    return sum(event == "broadcast" or event.startswith("broadcast failed") for event in events)


async def test_servers_join_and_leave_broadcasts_and_lost_ones_hold_nobody_up(
    publisher: WeightPublisher, bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    servers = Servers(bus, run_name)
    first, second = servers.add(2)
    versions = [
        await publisher.publish(large(seed), lineage="a", optimizer_step=seed) for seed in range(2)
    ]
    await fetched([first, second], versions[1], 1, weight_sync)
    await fetched([first, second], versions[1], 1, weight_sync)
    assert (first.member.num_groups, second.member.num_groups) == (1, 1)
    (third,) = servers.add(1)
    await fetched([first, second, third], versions[1], 1, weight_sync)
    assert [each.member.num_groups for each in servers.made] == [2, 2, 1]
    third.member.close()  # as if its process died
    version = await publisher.publish(large(2), lineage="a", optimizer_step=2)
    await fetched([first, second], version, 2, weight_sync)
    assert [each.member.num_groups for each in (first, second)] == [3, 3]
    assert "broadcast failed" not in weight_sync.log
    assert first.relay.source is None, "a version came over ZMQ"
    second.member._group.close()  # in the middle of the next one
    await fetched([first, second], version, 2, weight_sync)
    assert "broadcast failed" in weight_sync.log
    await fetched([first, second], version, 2, weight_sync)  # all lived: the members again
    assert [each.member.num_groups for each in (first, second)] == [4, 4]
    assert weight_sync.log.count("broadcast failed") == 1
    for receiver in servers.made:
        await receiver.close()
