"""Servers of many hosts fetch versions from each other: real weight_sync, sockets and chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tailrace.bus import Bus
from tailrace.weights import StagedWeights, TensorBytes, WeightPublisher, WeightReceiver
from tailrace.weights import relay as relays
from tailrace_protos.weights import WeightsApplied
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess
from tests.integration.weight_sync.test_weight_sync import newest, newest_with, same

NUM_BYTES = 12_000_000  # a dozen chunks, the last one short


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No relay that a busy machine stops counts as mute: its bytes would come from elsewhere."""
    monkeypatch.setattr(relays, "_MUTE_S", 30.0)


def large(seed: int) -> list[TensorBytes]:
    values = np.random.default_rng(seed).integers(0, 255, NUM_BYTES, np.uint8)
    return [
        TensorBytes("a", "uint8", (5_000_000,), values[:5_000_000].data),
        TensorBytes("b", "uint8", (NUM_BYTES - 5_000_000,), values[5_000_000:].data),
    ]


class Servers:
    """Receivers on hosts of their own."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._run = bus, run
        self.made: list[WeightReceiver] = []

    def add(self, num: int, host: str = "") -> list[WeightReceiver]:
        new = []
        for _ in range(num):
            name = f"s{len(self.made)}"
            # Any address but the loopback's own stands for one that other hosts reach.
            made = WeightReceiver(
                self._bus, self._run, host or f"host-{name}", name, bind_host="127.0.0.2"
            )
            self.made.append(made)
            new.append(made)
        return new

    async def fetch(self, receiver: WeightReceiver) -> StagedWeights:
        return await receiver.fetch(await newest(receiver))

    async def applied(self, receiver: WeightReceiver, staged: StagedWeights) -> None:
        name = f"s{self.made.index(receiver)}"
        await receiver.report(WeightsApplied(name, staged.manifest.policy_version, 0.1, 0.1, 0.1))

    @property
    def num_relayed(self) -> int:
        return sum(receiver.relay.num_sent_bytes for receiver in self.made)


@pytest.fixture
async def publisher(
    bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> AsyncIterator[WeightPublisher]:
    made = WeightPublisher(bus, run_name, HOST_ID)
    yield made
    await made.close()


@pytest.fixture
async def servers(bus: Bus, run_name: str) -> AsyncIterator[Servers]:
    made = Servers(bus, run_name)
    yield made
    for receiver in made.made:
        await receiver.close()


async def test_eight_hosts_take_one_copy_from_weight_sync_and_the_rest_from_each_other(
    publisher: WeightPublisher, servers: Servers
) -> None:
    await publisher.publish(large(0), lineage="a", optimizer_step=0)
    staged = await asyncio.gather(*(servers.fetch(each) for each in servers.add(8)))
    assert all(same(each, large(0)) for each in staged)
    assert not any(isinstance(each.buffer.obj, bytearray) for each in staged)
    assert servers.num_relayed >= 6 * NUM_BYTES  # of 8; servers that asked late may add to the root


async def test_without_relays_all_bytes_come_from_weight_sync(
    publisher: WeightPublisher, servers: Servers, weight_sync: WeightSyncProcess
) -> None:
    weight_sync.kill()
    weight_sync.configure(", relays: false")
    weight_sync.start()
    await publisher.publish(large(0), lineage="a", optimizer_step=0)
    staged = await asyncio.gather(*(servers.fetch(each) for each in servers.add(3)))
    assert all(same(each, large(0)) for each in staged)
    assert servers.num_relayed == 0
    assert all(each.relay.source is None for each in servers.made)


async def test_a_late_server_fetches_from_servers_that_applied_the_version(
    publisher: WeightPublisher, servers: Servers
) -> None:
    await publisher.publish(large(1), lineage="a", optimizer_step=1)
    (first,) = servers.add(1)
    staged = await servers.fetch(first)
    await servers.applied(first, staged)
    (late,) = servers.add(1, host="host-s0")  # weight_sync prefers a server of the same host
    async with asyncio.timeout(60):
        assert same(await servers.fetch(late), large(1))
    assert first.relay.num_sent_bytes >= NUM_BYTES


@pytest.mark.parametrize("death", ["closed", "mute"])
async def test_a_dead_or_stalled_relay_is_routed_around_and_no_chunk_comes_twice(
    publisher: WeightPublisher, servers: Servers, death: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "_MUTE_S", 1.0)
    await publisher.publish(large(2), lineage="a", optimizer_step=2)
    (relay,) = servers.add(1, host="one")
    await servers.applied(relay, await servers.fetch(relay))
    if death == "closed":
        await relay.relay._server.stop()
    else:
        relay.relay._server._task.cancel()  # type: ignore[union-attr]  # the socket stays open
    (other,) = servers.add(1, host="one")  # its only neighbour is that server
    async with asyncio.timeout(120):
        staged = await servers.fetch(other)
    assert same(staged, large(2))


async def test_a_relay_that_sends_damaged_bytes_costs_a_repair_and_no_version(
    publisher: WeightPublisher, servers: Servers
) -> None:
    version = await publisher.publish(large(3), lineage="a", optimizer_step=3)
    (relay,) = servers.add(1, host="one")
    await servers.applied(relay, await servers.fetch(relay))
    held = relay.relay._held(version, False)
    assert held is not None
    held.data[6_000_000] ^= 1
    (other,) = servers.add(1, host="one")
    assert same(await servers.fetch(other), large(3))
    assert relay.relay.num_sent_bytes == NUM_BYTES


async def test_an_interrupted_fetch_goes_on_where_it_stood(
    publisher: WeightPublisher, servers: Servers
) -> None:
    version = await publisher.publish(large(4), lineage="a", optimizer_step=4)
    (server,) = servers.add(1)
    available = await newest(server)
    fetching = asyncio.create_task(server.fetch(available))
    async with asyncio.timeout(60):
        while (held := server.relay._held(version, False)) is None:
            await asyncio.sleep(0)
        await held.arrival(10)
    fetching.cancel()
    await asyncio.wait([fetching])
    again = server.relay._held(version, False)
    assert again is held
    missing = len(again.missing())
    assert same(await server.fetch(available), large(4))
    assert missing < len(range(0, NUM_BYTES, 1 << 20))


async def test_differences_travel_along_the_servers_too(
    publisher: WeightPublisher, servers: Servers
) -> None:
    values = np.random.default_rng(0).integers(0, 255, NUM_BYTES, np.uint8)

    def stepped(step: int) -> list[TensorBytes]:
        values[step::7] += 1  # too much noise to compress: several chunks
        return [TensorBytes("w", "uint8", (NUM_BYTES,), values.copy().data)]

    first = stepped(0)
    await publisher.publish(first, lineage="a", optimizer_step=0)
    made = servers.add(3, host="one")
    for staged, server in zip(
        await asyncio.gather(*(servers.fetch(each) for each in made)), made, strict=True
    ):
        await servers.applied(server, staged)
    relayed = servers.num_relayed
    second = stepped(1)
    version = await publisher.publish(second, lineage="a", optimizer_step=1)
    available = await newest_with(made[0], version)
    assert available.deltas
    staged_now = await asyncio.gather(*(each.fetch(available) for each in made))
    assert all(same(each, second) for each in staged_now)
    assert all(0 < each.num_fetched < NUM_BYTES / 2 for each in staged_now)
    assert servers.num_relayed - relayed == 2 * sum(delta.num_bytes for delta in available.deltas)


async def test_weight_sync_that_does_not_name_a_holder_is_one_itself(
    publisher: WeightPublisher, servers: Servers
) -> None:
    """A version that it still sends, but for which it plans no longer."""
    await publisher.publish(large(5), lineage="a", optimizer_step=5)
    (server,) = servers.add(1)
    available = await newest(server)
    server.relay._run = "a-run-without-weight_sync"
    assert same(await server.fetch(available), large(5))
