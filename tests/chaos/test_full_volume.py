"""The volume of the weights, and the memory of weight_sync, fill up: runs go on, and are told why.

Needs the right to mount small disks; skipped elsewhere. `TAILRACE_CHAOS_ROUNDS` sets how often a disk
is full (20).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection
from tailrace.weights import WeightsNotTakenError
from tailrace_weight_sync.adapters.snapshot_file import SnapshotFile
from tests.chaos.weight_run import DEADLINE_S, WeightRun, audited
from tests.world.disk import fill, small_disk, with_own_memory

ROUNDS = int(os.environ.get("TAILRACE_CHAOS_ROUNDS", "20"))
DISK_MIB = 48  # three versions, and two snapshots while one is replaced
MEMORY_MIB = 24  # three versions
NO_FILE = "weights not written to the volume, servers fetch them over ZMQ: free space there"
NO_SNAPSHOT = "snapshot not saved: free space"
NO_MEMORY = "bytes of weights in /dev/shm. Remedy: enlarge it"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2 * DEADLINE_S + 20 * ROUNDS)]


@pytest.fixture
async def run(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> AsyncIterator[WeightRun]:
    """Two servers that read a volume; weight_sync keeps its snapshots beside it."""
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        files = {"transport": "files", "volume": str(disk), "snapshot_interval_s": 0.1}
        state = {"TAILRACE_STATE_DIR": str(disk / "state")}
        hosts = ["sync-host", "far-host"]
        made = WeightRun(bus, endpoints, tmp_path, hosts=hosts, weight_sync=files, variables=state)
        made.weight_sync.prefix = with_own_memory(MEMORY_MIB)
        async with made.running(redis):
            yield made


async def snapshot_is_newest(run: WeightRun) -> None:
    snapshot = SnapshotFile(run.folder / "disk/state/weight_sync" / f"{run.bus.run}.weights")
    async with asyncio.timeout(DEADLINE_S):
        while (saved := snapshot.load()) is None or saved[0].policy_version != run.newest:
            await asyncio.sleep(0.02)


async def full_volume(run: WeightRun) -> None:
    """A version that has no room on the volume goes another way; the next one is a file again."""
    await snapshot_is_newest(run)  # one that replaces an older one meanwhile would make room
    num_told = run.weight_sync.log.count(NO_FILE)
    ballast = run.folder / "disk" / "ballast"
    fill(ballast)
    await run.publish()
    await run.logged(run.weight_sync, NO_FILE, num_told)
    await run.all_on_newest()
    assert (await run.available()).source.file == ""
    await run.still_generates()
    ballast.unlink()
    await snapshot_is_newest(run)
    await run.publish()
    await run.all_on_newest()
    file = Path((await run.available()).source.file)
    assert file.parent.name == str(run.newest)
    assert file.exists()


async def full_memory(run: WeightRun) -> None:
    """Without a dropped version to write over, the learner offers a version until there is room for it,
    and is told what is missing.
    """
    before, num_told = run.newest, run.weight_sync.log.count(NO_MEMORY)
    ballast = Path(f"/proc/{run.weight_sync.running.pid}/root/dev/shm/ballast")
    fill(ballast)
    publishing = asyncio.create_task(run.publish())
    await run.logged(run.weight_sync, NO_MEMORY, num_told)
    await run.still_generates()
    assert await run.versions() == [before, before]
    ballast.unlink()
    async with asyncio.timeout(DEADLINE_S):
        await publishing
    await run.all_on_newest()


async def reused_memory(run: WeightRun) -> None:
    """A version is written over a dropped one: it needs no room."""
    ballast = Path(f"/proc/{run.weight_sync.running.pid}/root/dev/shm/ballast")
    fill(ballast)
    await run.publish()
    await run.all_on_newest()
    await run.still_generates()
    ballast.unlink()


async def test_full_memory_delays_a_version_only_until_one_is_dropped(
    run: WeightRun, outbox: Outbox
) -> None:
    async with run.called():
        await full_memory(run)
        await run.publish()
        await run.all_on_newest()  # the first version is dropped for this one
        for _ in range(ROUNDS // 2):
            await reused_memory(run)
    assert all(process.running.poll() is None for process in run.processes)
    await audited(run, outbox)


async def test_full_disks_delay_versions_and_end_nothing(run: WeightRun, outbox: Outbox) -> None:
    async with run.called():
        for _ in range(ROUNDS // 2):
            await full_volume(run)
            await run.still_generates()
    assert NO_SNAPSHOT in run.weight_sync.log  # in the first round no older file made room
    assert all(process.running.poll() is None for process in run.processes)
    assert not any("weights file not read" in server.log for server in run.servers)
    await audited(run, outbox)


async def test_memory_without_room_for_the_first_version_is_told_at_once_with_the_remedy(
    bus: Bus, endpoints: Endpoints, tmp_path: Path, redis: StoreConnection
) -> None:
    run = WeightRun(bus, endpoints, tmp_path, hosts=[])
    run.weight_sync.prefix = with_own_memory(2)
    with pytest.raises(WeightsNotTakenError, match=r"in /dev/shm\. Remedy: enlarge it"):
        async with run.running(redis):
            pytest.fail("the version does not fit")
