"""Servers, relays and weight_sync die, stall and get wrong updates: generation and versions go on.

Three inference servers, each a process on a host of its own, fetch over ZMQ, also from each other.
`TAILRACE_CHAOS_ROUNDS` sets how often each fault happens (1), `TAILRACE_CHAOS_STALL_S` for how long a
process is stopped (3; the long run takes 20 and 10).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.bus import Bus
from tailrace.channel import ZmqGenerateClient
from tailrace.config import Endpoints
from tailrace.store import Blobs, Outbox, StoreConnection
from tailrace.weights import TensorBytes, WeightPublisher
from tailrace_protos.base import pack_int32
from tailrace_protos.control import ServerState, ServerStatus
from tailrace_protos.event import ServerWeightsApplied, WeightsPublished
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.weights import ModelCard
from tests.integration.inference import world as small
from tests.integration.inference.world import address_of, weights_of
from tests.world.processes import ServiceProcess, environment

ROUNDS = int(os.environ.get("TAILRACE_CHAOS_ROUNDS", "1"))
STALL_S = float(os.environ.get("TAILRACE_CHAOS_STALL_S", "3"))
FAULTS = (
    "server killed",
    "server stopped",
    "weight_sync killed",
    "weight_sync stopped",
    "wrong update",
)
NUM_SERVERS = 3
MODEL = small.MODEL | {"hidden_size": 256, "vocab_size": 4000}  # 5 MB: several chunks


def make_tensors(seed: int) -> list[TensorBytes]:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MODEL", MODEL)
        return weights_of(small.make_model(seed))


class Run:
    """Processes of a run, a learner that publishes, and a caller that never stops to ask."""

    def __init__(self, bus: Bus, endpoints: Endpoints, folder: Path) -> None:
        self.bus = bus
        self.publisher = WeightPublisher(bus, bus.run, "learner-host")
        config = folder / "experiment.yaml"
        weight_sync = {"announce_interval_s": 0.2, "bind_host": "127.0.0.2"}
        section = {"bind_host": "127.0.0.2", "drain_s": 1.0, "max_running": 16}
        sections = {"weight_sync": weight_sync, "inference": section}
        config.write_text(json.dumps({"exp_name": bus.run, "output_dir": str(folder)} | sections))
        hosts = ["sync-host", *(f"host-{at}" for at in range(NUM_SERVERS))]
        variables = [environment(endpoints, folder) | {"TAILRACE_HOST_ID": host} for host in hosts]
        self.weight_sync = ServiceProcess("weight_sync", config, variables[0], folder / "sync.log")
        self.servers = [
            ServiceProcess(
                "inference", config, variables[1 + at], folder / f"{at}.log", ("--server-id", f"s{at}")
            )
            for at in range(NUM_SERVERS)
        ]
        self.step = 0
        self.newest = -1
        self.versions_seen: list[int] = []  # of sampled tokens
        self.num_generated = 0

    async def publish(self) -> None:
        """A whole new version."""
        self.step += 1
        self.newest = await self.publisher.publish(
            make_tensors(self.step), lineage="a", optimizer_step=self.step
        )

    async def publish_wrong(self) -> None:
        """A version that fits no server."""
        self.step += 1
        short = make_tensors(self.step)[1:]
        await self.publisher.publish(short, lineage="a", optimizer_step=self.step)

    async def ready(self) -> list[ServerStatus]:
        found = await self.bus.registry.all()
        return [status for status in found if status.state is ServerState.READY]

    async def all_on_newest(self) -> None:
        async with asyncio.timeout(90):
            while True:
                now = {status.server_id: status.policy_version for status in await self.ready()}
                if list(now.values()) == [self.newest] * NUM_SERVERS:
                    return
                await asyncio.sleep(0.05)

    async def generate(self) -> None:
        """Calls a ready server, again and again; a call at a dead one is given up."""
        client = ZmqGenerateClient()
        await client.start()
        number = 0
        choose = random.Random(0)
        while True:
            ready = await self.ready()
            if not ready:
                await asyncio.sleep(0.05)
                continue
            number += 1
            request = GenerateRequest(f"c{number}", f"e{number}", pack_int32([5, 6, 7]), 8)
            with suppress(Exception):
                async with asyncio.timeout(2):
                    call = client.generate(address_of(choose.choice(ready)), request)
                    made = await call.collect()
                self.versions_seen += [span.policy_version for span in made.spans]
                self.num_generated += len(made.token_ids)

    async def still_generates(self) -> None:
        before = self.num_generated
        async with asyncio.timeout(60):
            while self.num_generated < before + 16:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def stopped(process: ServiceProcess) -> AsyncIterator[None]:
    process.running.send_signal(signal.SIGSTOP)
    yield
    await asyncio.sleep(STALL_S)
    process.running.send_signal(signal.SIGCONT)


async def strike(run: Run, fault: str, choose: random.Random) -> None:
    """One fault while a version is on its way."""
    server: Any = choose.choice(run.servers)
    if fault == "server killed":
        publishing = asyncio.create_task(run.publish())
        await asyncio.sleep(choose.random() * 0.3)
        server.kill()
        await publishing
        await run.still_generates()
        server.start()
    elif fault == "server stopped":
        async with stopped(server):
            await run.publish()
            await run.still_generates()
    elif fault == "weight_sync killed":
        publishing = asyncio.create_task(run.publish())
        await asyncio.sleep(choose.random() * 0.3)
        run.weight_sync.kill()
        await run.still_generates()
        run.weight_sync.start()
        await publishing
    elif fault == "weight_sync stopped":
        publishing = asyncio.create_task(run.publish())
        async with stopped(run.weight_sync):
            await run.still_generates()
        await publishing
    else:
        before = run.newest
        await run.publish_wrong()
        await run.still_generates()
        assert {status.policy_version for status in await run.ready()} == {before}
        await run.publish()


@pytest.fixture
async def run(bus: Bus, endpoints: Endpoints, tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(bus, endpoints, tmp_path)
    processes = [made.weight_sync, *made.servers]
    for process in processes:
        process.start()
    yield made
    for process in processes:
        process.running.send_signal(signal.SIGCONT)
        process.kill()
    await made.publisher.close()
    for path in Path("/dev/shm").glob(f"tailrace.{bus.run}.*"):
        path.unlink()


@pytest.mark.heavy
@pytest.mark.timeout(120 + 60 * len(FAULTS) * ROUNDS)
async def test_generation_and_versions_go_on_whatever_dies(
    run: Run, bus: Bus, redis: StoreConnection, outbox: Outbox
) -> None:
    await bus.provision_run(bus.run)
    await Blobs(redis, bus.run).put_model_card(ModelCard(json.dumps(MODEL).encode(), {}))
    await run.publish()
    await run.all_on_newest()
    asking = asyncio.create_task(run.generate())
    choose = random.Random(1)
    for _ in range(ROUNDS):
        for fault in choose.sample(FAULTS, len(FAULTS)):
            await strike(run, fault, choose)
            await run.all_on_newest()
    await run.still_generates()
    asking.cancel()

    events = [event.body for event in await outbox.read(100_000, 0)]
    published = [body.policy_version for body in events if isinstance(body, WeightsPublished)]
    assert len(published) == len(set(published)) == run.step
    applied = {body.policy_version for body in events if isinstance(body, ServerWeightsApplied)}
    assert run.newest in applied <= set(published)
    assert len(applied) <= run.step - ROUNDS, "a wrong update was applied"
    assert set(run.versions_seen) <= applied
    relayed = [log for log in (process.log for process in run.servers) if "weights applied" in log]
    assert len(relayed) == NUM_SERVERS
