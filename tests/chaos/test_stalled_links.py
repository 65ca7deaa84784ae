"""Links stall while a version is on its way: servers go on, give up in time, and take another way.

`TAILRACE_CHAOS_ROUNDS` sets how often a link stalls (20).
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection
from tests.chaos.weight_run import DEADLINE_S, LINKED, WeightRun, audited, linked
from tests.world.link import Fault, Links

ROUNDS = int(os.environ.get("TAILRACE_CHAOS_ROUNDS", "20"))
GIVEN_UP = "no weights from tcp://"  # as a server reports it
MAX_BYTES = 2_000_000  # of the 5 MB of a version

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2 * DEADLINE_S + 20 * ROUNDS)]


async def one_connection(run: WeightRun, links: Links, after_bytes: int) -> None:
    """One connection to weight_sync carries nothing more; the server makes another one."""
    with links.disturbed(frozenset({run.root_port}), Fault(after_bytes)) as fault:
        await run.publish()
        await run.struck(fault)
        await run.all_on_newest()


async def for_a_while(run: WeightRun, links: Links, after_bytes: int) -> None:
    """No connection to weight_sync carries anything, until it does again."""
    before = run.newest
    with links.disturbed(frozenset({run.root_port}), Fault(after_bytes, holds_all=True)) as fault:
        await run.publish()
        await run.struck(fault)
        await run.still_generates()
        assert set(await run.versions()) == {before}
    await run.all_on_newest()


async def past_the_deadline(run: WeightRun, links: Links, after_bytes: int) -> None:
    """The link to weight_sync is dead for longer than a server that fetches over it waits."""
    before, num_given_up = run.newest, run.weight_sync.log.count(GIVEN_UP)
    with links.disturbed(frozenset({run.root_port}), Fault(after_bytes, holds_all=True)) as fault:
        await run.publish()
        await run.struck(fault)
        await run.logged(run.weight_sync, GIVEN_UP, num_given_up)
        await run.still_generates()
        assert set(await run.versions()) == {before}
    await run.all_on_newest()


async def of_servers(run: WeightRun, links: Links, after_bytes: int) -> None:
    """No server can send to another one; all of them fetch from weight_sync."""
    ports = links.ports - {run.root_port}
    assert ports
    with links.disturbed(ports, Fault(after_bytes, holds_all=True)) as fault:
        await run.publish()
        await run.struck(fault)
        await run.all_on_newest()


STALLS = (one_connection, for_a_while, of_servers)


@pytest.fixture
async def linked_run(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> AsyncIterator[tuple[WeightRun, Links]]:
    """Three servers on other hosts, which fetch over links from weight_sync and from each other."""
    hosts = ["host-0", "host-1", "host-2"]
    made = WeightRun(bus, endpoints, tmp_path, hosts=hosts, **LINKED)
    async with linked(made) as links, made.running(redis):
        yield made, links


async def test_a_stalled_link_holds_up_no_token_and_no_later_version(
    linked_run: tuple[WeightRun, Links], outbox: Outbox
) -> None:
    run, links = linked_run
    choose = random.Random(0)
    async with run.called():
        for number in range(ROUNDS):
            stall = past_the_deadline if number == ROUNDS // 2 else STALLS[number % len(STALLS)]
            await stall(run, links, choose.randrange(MAX_BYTES))
            await run.still_generates()
    assert "holder of weights replaced" in "".join(server.log for server in run.servers)
    await audited(run, outbox)
