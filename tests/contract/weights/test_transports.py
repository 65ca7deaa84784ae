"""Every way of the weights to servers, with real processes of weight_sync and of servers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.weights import TensorBytes, WeightPublisher
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess
from tests.world.processes import environment

pytestmark = pytest.mark.heavy  # `tests/integration/weight_sync` has each way inside of the test

NUM_BYTES = 12_000_000  # a dozen chunks, the last one short
WAYS = {  # settings of weight_sync, and whether servers are on its host
    "memory": ("", True),
    "zmq": (", relays: false", False),
    "relays": ("", False),
    "files": (", transport: files, volume: {volume}", False),
    "broadcast": (", transport: broadcast, broadcast_timeout_s: 20.0", False),
    "hasty broadcast": (", transport: broadcast, broadcast_timeout_s: 2.0", False),
}
# Where no member is lost, a busy machine may hold one up for longer than 2 s.
SETTINGS = WAYS | {"patient broadcast": (", transport: broadcast, broadcast_timeout_s: 25.0", False)}


def made(seed: int) -> list[TensorBytes]:
    """Weights of odd sizes that compress badly."""
    values = np.random.default_rng(seed).integers(0, 255, NUM_BYTES, np.uint8)
    return [
        TensorBytes("a", "uint8", (5_000_001,), values[:5_000_001].data),
        TensorBytes("b", "uint8", (NUM_BYTES - 5_000_001,), values[5_000_001:].data),
    ]


@dataclass
class Server:
    """A server process; `lines` are what it has told."""

    server_id: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def lines(self) -> list[dict[str, Any]]:
        whole, _, _ = self.log.read_text().rpartition("\n")  # it may be writing a line
        return [json.loads(line) for line in whole.splitlines() if line[:1] == "{"]

    async def took(self, policy_version: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """Its line about a version."""
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.lines:
                    if line.get("policy_version") == policy_version:
                        return line
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)


@dataclass
class World:
    """weight_sync, a learner that publishes, and servers."""

    way: str
    folder: Path
    weight_sync: WeightSyncProcess
    publisher: WeightPublisher
    servers: list[Server] = field(default_factory=list)
    step: int = 0
    newest: int = -1

    def add(self, host: str = "") -> Server:
        """Starts one more server; by default on a host of its own, if the way leads to others."""
        name = f"s{len(self.servers)}"
        host, bind = (HOST_ID, "") if SETTINGS[self.way][1] else (host or f"host-{name}", "127.0.0.2")
        log = self.folder / f"{name}.log"
        argv = [sys.executable, "-m", "tests.contract.weights.server"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*argv, self.weight_sync.run, name, host, bind],
                env={**self.weight_sync.environment, "STRIKE_AT": str(self.folder / f"{name}.strike")},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.servers.append(Server(name, log, process))
        return self.servers[-1]

    def strike_in_broadcast(self, server: Server, fault: signal.Signals) -> None:
        """The server gets this signal when it has a place in the next broadcast."""
        (self.folder / f"{server.server_id}.strike").write_text(str(int(fault)))

    async def publish(self) -> int:
        self.step += 1
        self.newest = await self.publisher.publish(
            made(self.step), lineage="a", optimizer_step=self.step
        )
        return self.newest

    async def all_have(self, version: int, servers: list[Server]) -> list[dict[str, Any]]:
        """Lines of these servers about the newest version; each has its bytes."""
        lines = [await server.took(version) for server in servers]
        content = xxhash.xxh3_64()
        for tensor in made(self.step):
            content.update(tensor.data)
        assert {line["hash"] for line in lines} == {content.hexdigest()}
        return lines


@pytest.fixture
def weight_sync(endpoints: Endpoints, run_name: str, tmp_path: Path) -> Iterator[WeightSyncProcess]:
    """Not started."""
    made = WeightSyncProcess(
        "weight_sync",
        tmp_path / "experiment.yaml",
        environment(endpoints, tmp_path),
        tmp_path / "log",
        run=run_name,
    )
    yield made
    made.kill()
    for path in made.segments():
        path.unlink()


@pytest.fixture(params=[way for way in WAYS if way != "hasty broadcast"])
async def world(
    request: pytest.FixtureRequest,
    bus: Bus,
    weight_sync: WeightSyncProcess,
    tmp_path: Path,
) -> AsyncIterator[World]:
    weight_sync.configure(SETTINGS[request.param][0].format(volume=tmp_path / "volume"))
    weight_sync.start()
    found = World(
        request.param, tmp_path, weight_sync, WeightPublisher(bus, weight_sync.run, "learner-host")
    )
    yield found
    for server in found.servers:
        server.process.kill()
        server.process.wait()
    await found.publisher.close()


def goes_its_way(way: str, lines: list[dict[str, Any]]) -> bool:
    """Whether the bytes came as they should."""
    fetched = [line["num_fetched"] for line in lines]
    if way in ("memory", "files"):
        return not any(fetched)
    if way == "relays":
        return any(line["num_relayed"] for line in lines)
    assert all(fetched)
    relayed = any(line["num_relayed"] for line in lines)
    return not relayed and all(bool(line["num_groups"]) == (way == "broadcast") for line in lines)


async def test_all_servers_get_every_byte_and_come_and_go_while_versions_are_published(
    world: World,
) -> None:
    first, second = world.add(), world.add()
    await world.all_have(await world.publish(), [first, second])
    late = world.add()
    await late.took(world.newest)
    lines = await world.all_have(await world.publish(), [first, second, late])
    assert goes_its_way(world.way, lines), lines
    second.process.kill()
    await world.all_have(await world.publish(), [first, late])
    joined = world.add()
    await world.all_have(await world.publish(), [first, late, joined])


@pytest.mark.parametrize("world", ["patient broadcast"], indirect=True)
async def test_a_group_lasts_as_long_as_its_members(world: World) -> None:
    first, second = world.add(), world.add()
    for _ in range(2):  # the first one may find servers that still start
        await world.all_have(await world.publish(), [first, second])
    before = [line["num_groups"] for line in await world.all_have(world.newest, [first, second])]
    for _ in range(3):
        lines = await world.all_have(await world.publish(), [first, second])
    assert [line["num_groups"] for line in lines] == before
    late = world.add()
    await late.took(world.newest)
    lines = await world.all_have(await world.publish(), [first, second, late])
    assert [line["num_groups"] for line in lines[:2]] == [number + 1 for number in before]
    assert "broadcast failed" not in world.weight_sync.log


@pytest.mark.parametrize("world", ["hasty broadcast"], indirect=True)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_member_that_dies_or_stops_in_a_broadcast_holds_nobody_up(
    world: World, fault: signal.Signals
) -> None:
    servers = [world.add(), world.add(), world.add()]
    for _ in range(2):
        await world.all_have(await world.publish(), servers)
    lost, *others = servers
    world.strike_in_broadcast(lost, fault)
    for _ in range(2):
        assert await world.all_have(await world.publish(), others)
    if fault == signal.SIGSTOP:
        lost.process.send_signal(signal.SIGCONT)
        await world.all_have(world.newest, [lost])
        await world.all_have(await world.publish(), servers)


@pytest.mark.parametrize("world", ["relays"], indirect=True)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_late_server_fetches_from_the_nearest_holder_and_around_a_dead_one(
    world: World, fault: signal.Signals
) -> None:
    first, second = world.add(), world.add()
    await world.all_have(await world.publish(), [first, second])
    near = world.add(host="host-s0")
    (line,) = await world.all_have(world.newest, [near])
    assert line["holders"] == ["s0"]
    first.process.send_signal(fault)
    late = world.add(host="host-s0")
    (line,) = await world.all_have(world.newest, [late])
    assert line["holders"] == ["s0", "s2"], (
        "the other server of the host takes the place of the dead one"
    )
    await world.all_have(await world.publish(), [second, near, late])
