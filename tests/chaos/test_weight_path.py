"""Servers, relays and weight_sync die, stall and get wrong updates: generation and versions go on.

Three inference servers, each a process on a host of its own, fetch over ZMQ, also from each other.
`TAILRACE_CHAOS_ROUNDS` sets how often each fault happens (1), `TAILRACE_CHAOS_STALL_S` for how long a
process is stopped (3; the long run takes 20 and 10).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection
from tests.chaos.weight_run import WeightRun, audited, make_model
from tests.integration.inference.world import weights_of
from tests.world.processes import ServiceProcess

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


@asynccontextmanager
async def stopped(process: ServiceProcess) -> AsyncIterator[None]:
    process.running.send_signal(signal.SIGSTOP)
    yield
    await asyncio.sleep(STALL_S)
    process.running.send_signal(signal.SIGCONT)


async def strike(run: WeightRun, fault: str, choose: random.Random) -> None:
    """One fault while a version is on its way."""
    server = choose.choice(run.servers)
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
        await run.offer(weights_of(make_model(run.step))[1:])
        await run.still_generates()
        assert set(await run.versions()) == {before}
        await run.publish()


@pytest.fixture
async def run(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> AsyncIterator[WeightRun]:
    hosts = [f"host-{at}" for at in range(NUM_SERVERS)]
    made = WeightRun(bus, endpoints, tmp_path, hosts=hosts, calls_may_fail=True)
    async with made.running(redis):
        yield made


@pytest.mark.heavy
@pytest.mark.timeout(120 + 60 * len(FAULTS) * ROUNDS)
async def test_generation_and_versions_go_on_whatever_dies(run: WeightRun, outbox: Outbox) -> None:
    choose = random.Random(1)
    async with run.called():
        for _ in range(ROUNDS):
            for fault in choose.sample(FAULTS, len(FAULTS)):
                await strike(run, fault, choose)
                await run.all_on_newest()
    await audited(run, outbox)
    assert all("weights applied" in process.log for process in run.servers)
