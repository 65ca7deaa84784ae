"""Keys of the section `weight_sync`: changing one changes what a real service keeps and tells."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Args
from tailrace.weights import WeightPublisher, WeightReceiver
from tailrace_weight_sync.__main__ import build
from tailrace_weight_sync.adapters.snapshot_file import SnapshotFile
from tests.integration.weight_sync.conftest import HOST_ID
from tests.integration.weight_sync.test_weight_sync import newest, same, stepped, weights
from tests.world.serving import eventually, serving


class World(NamedTuple):
    """A run without its service."""

    bus: Bus
    endpoints: Endpoints
    folder: Path

    @asynccontextmanager
    async def publisher(self, **section: Any) -> AsyncIterator[WeightPublisher]:
        """The learner's side of a service with this section."""
        run = RunConfig(exp_name=self.bus.run)
        experiment = {"exp_name": self.bus.run, "weight_sync": section}
        service = build(Args("run.yaml", "w", experiment, run, self.endpoints))
        async with serving(service):
            made = WeightPublisher(self.bus, self.bus.run, HOST_ID)
            yield made
            await made.close()

    @property
    def snapshot(self) -> SnapshotFile:
        return SnapshotFile(self.folder / "weight_sync" / f"{self.bus.run}.weights")


@pytest.fixture
def world(bus: Bus, endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    return World(bus, endpoints, tmp_path)


async def publish(publisher: WeightPublisher, *steps: int) -> None:
    for step in steps:
        await publisher.publish(weights(step), lineage="a", optimizer_step=step)


@pytest.mark.parametrize("keep_versions", [1, 3])
async def test_keep_versions(world: World, keep_versions: int) -> None:
    async with world.publisher(keep_versions=keep_versions) as publisher:
        await publish(publisher, 0, 1, 2, 3)
        held = Path("/dev/shm").glob(f"tailrace.{world.bus.run}.weight_sync.*")
        assert len(list(held)) == keep_versions


async def test_snapshot_interval_s(world: World) -> None:
    """The file follows the newest version with at most this delay; by default these take a minute."""
    snapshot = world.snapshot
    async with world.publisher(snapshot_interval_s=0.02) as publisher, asyncio.timeout(50):
        for step in range(12):
            await publish(publisher, step)
            await eventually(lambda step=step: step_in(snapshot) == step)
    assert step_in(snapshot) == 11


async def test_snapshot_interval_s_of_0_writes_none(world: World) -> None:
    async with world.publisher(snapshot_interval_s=0) as publisher:
        await publish(publisher, 0, 1)
    assert step_in(world.snapshot) is None


def step_in(snapshot: SnapshotFile) -> int | None:
    """The optimizer step of the saved version."""
    saved = snapshot.load()
    return None if saved is None else saved[0].optimizer_step


@pytest.mark.parametrize(("share", "num_deltas"), [(0.0, 0), (0.006, 1), (1.0, 3)])
async def test_max_delta_share(world: World, share: float, num_deltas: int) -> None:
    """The newest deltas that together stay below the share are announced."""
    async with world.publisher(max_delta_share=share) as publisher:
        receiver = WeightReceiver(world.bus, world.bus.run, "another-host", "s0")
        await publisher.publish(stepped(0), lineage="a", optimizer_step=0)
        await receiver.fetch(await newest(receiver))
        for step in (1, 2, 3):
            await publisher.publish(stepped(step), lineage="a", optimizer_step=step)
        available = await newest(receiver)
        assert available.keep_baseline == bool(share)
        assert len(available.deltas) == num_deltas


@pytest.mark.parametrize(
    ("section", "host"),
    [
        ({}, "127.0.0.1"),
        ({"bind_host": "127.0.0.2"}, "127.0.0.2"),
        ({"bind_host": "0.0.0.0"}, socket.gethostname()),
        ({"bind_host": "0.0.0.0", "advertise_host": "localhost"}, "localhost"),
    ],
)
async def test_bind_host_and_advertise_host(world: World, section: dict[str, str], host: str) -> None:
    """Servers of other hosts are sent there, with a key."""
    async with world.publisher(**section) as publisher:
        await publish(publisher, 0)
        receiver = WeightReceiver(world.bus, world.bus.run, "another-host", "s0")
        available = await newest(receiver)
        assert available.source.zmq_endpoint.startswith(f"tcp://{host}:")
        assert available.source.zmq_public_key
        if host != socket.gethostname():  # whose name need not resolve here
            assert same(await receiver.fetch(available), weights(0))
