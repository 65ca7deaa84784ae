"""Bytes of versions change in memory and on the way: no server serves them, all get the right ones.

`TAILRACE_CHAOS_ROUNDS` sets how often each fault happens (20).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection
from tests.chaos.weight_run import DEADLINE_S, LINKED, WHOLE, WeightRun, audited, linked
from tests.integration.weight_sync.test_weight_sync import damage
from tests.world.link import Fault, Links
from tests.world.processes import ServiceProcess

ROUNDS = int(os.environ.get("TAILRACE_CHAOS_ROUNDS", "20"))
REPAIRED = "damaged weights copied again from the learner"
NOT_REPAIRED = "damaged weights stay"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2 * DEADLINE_S + 20 * ROUNDS)]


async def stop(process: ServiceProcess) -> None:
    """SIGSTOP, and wait until it has stopped."""
    process.running.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):
        while psutil.Process(process.running.pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.005)


async def publish_damaged(run: WeightRun, choose: random.Random, *, is_learner_damaged: bool) -> None:
    """A version that changes in weight_sync's memory before a server can take it."""
    for server in run.servers:
        await stop(server)
    await run.publish()
    available = await run.available()
    entry = choose.choice(available.manifest.tensors)
    at = entry.offset + choose.randrange(entry.num_bytes)
    damage(available, at=at)
    if is_learner_damaged:
        segment = run.publisher._segment
        assert segment is not None
        segment.data[at] ^= 1
    for server in run.servers:
        server.running.send_signal(signal.SIGCONT)


@pytest.fixture
async def run(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> AsyncIterator[WeightRun]:
    """A server that maps the versions, and one that fetches them."""
    made = WeightRun(bus, endpoints, tmp_path, hosts=["sync-host", "far-host"], weight_sync=WHOLE)
    async with made.running(redis):
        yield made


async def test_a_version_damaged_in_memory_is_copied_again_or_skipped_and_never_served(
    run: WeightRun, outbox: Outbox
) -> None:
    choose = random.Random(0)
    async with run.called():
        for number in range(ROUNDS):
            before, is_lost = run.newest, number % 2 == 1
            told = NOT_REPAIRED if is_lost else REPAIRED
            num_told = run.weight_sync.log.count(told)
            await publish_damaged(run, choose, is_learner_damaged=is_lost)
            await run.logged(run.weight_sync, told, num_told)
            if is_lost:
                await run.still_generates()
                assert await run.versions() == [before, before]
                await run.publish()
            await run.all_on_newest()
            await run.still_generates()
    assert "checksum of tensor" in run.servers[0].log
    await audited(run, outbox)


@pytest.fixture
async def linked_run(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> AsyncIterator[tuple[WeightRun, Links]]:
    """Two servers on other hosts, which fetch over links from weight_sync and from each other."""
    hosts = ["host-0", "host-1"]
    made = WeightRun(bus, endpoints, tmp_path, hosts=hosts, **LINKED)
    async with linked(made) as links, made.running(redis):
        yield made, links


async def test_bytes_that_change_on_a_link_cost_a_repetition_and_no_version(
    linked_run: tuple[WeightRun, Links], outbox: Outbox
) -> None:
    run, links = linked_run
    choose = random.Random(0)
    async with run.called():
        for number in range(ROUNDS):
            is_upward = number % 4 == 3  # requests are small: a round may send less than 1,800 bytes
            after_bytes = choose.randrange(600) if is_upward else choose.randrange(4_000_000)
            fault = Fault(after_bytes, is_upward=is_upward, flips=True)
            with links.disturbed(links.ports, fault):
                await run.publish()
                await run.struck(fault)
                await run.all_on_newest()
            await run.still_generates()
    for server in run.servers:
        assert server.log.count("weights applied") > ROUNDS  # the first version, then one a round
    await audited(run, outbox)
