"""Learner, weight_sync (a real process) and inference servers over NATS, Redis, ZMQ and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from tailrace.bus import Bus, CallFailedError, flush
from tailrace.store import Outbox, StoreConnection, Versions
from tailrace.weights import (
    ChecksumError,
    StagedWeights,
    TensorBytes,
    WeightPublisher,
    WeightReceiver,
    WeightsNotTakenError,
)
from tailrace.weights.segment import SegmentFolder, default_folder
from tailrace.weights.tensors import fill, layout
from tailrace_protos import subjects
from tailrace_protos.event import ServerWeightsApplied, WeightsPublished
from tailrace_protos.weights import (
    OfferWeights,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
    WeightSource,
    WeightsTaken,
)
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess


def weights(seed: int) -> list[TensorBytes]:
    """A float32 matrix, a bfloat16 vector and a scalar."""
    values = np.random.default_rng(seed).standard_normal(30_000).astype(np.float32)
    return [
        TensorBytes("model.embed.weight", "float32", (100, 300), values.data),
        TensorBytes("model.norm.weight", "bfloat16", (500,), values[:250].data),
        TensorBytes("scale", "float64", (), memoryview(np.float64(seed).tobytes())),
    ]


def stepped(step: int) -> list[TensorBytes]:
    """Weights of which each step changes one element in a hundred."""
    values = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
    for number in range(1, step + 1):
        values[number::100] += 1e-3
    return [TensorBytes("w", "float32", (30_000,), values.data), *weights(0)[1:]]


def same(staged: StagedWeights, tensors: list[TensorBytes]) -> bool:
    return [(t.name, t.dtype, t.shape, bytes(t.data)) for t in staged.tensors()] == [
        (t.name, t.dtype, t.shape, bytes(t.data)) for t in tensors
    ]


@pytest.fixture
async def publisher(
    bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> AsyncIterator[WeightPublisher]:
    made = WeightPublisher(bus, run_name, HOST_ID)
    yield made
    await made.close()


async def newest(receiver: WeightReceiver) -> WeightsAvailable:
    available = await receiver.current()
    assert available is not None
    return available


async def newest_with(receiver: WeightReceiver, policy_version: int) -> WeightsAvailable:
    async with asyncio.timeout(60):
        while True:
            available = await receiver.current()
            if available is not None and available.manifest.policy_version == policy_version:
                return available


def damage(available: WeightsAvailable, *, at: int) -> None:
    """Changes a byte of a version in the shared memory of weight_sync."""
    with (default_folder() / available.source.shm_name).open("r+b") as segment:
        segment.seek(at)
        (byte,) = segment.read(1)
        segment.seek(at)
        segment.write(bytes([byte ^ 1]))


async def has_snapshot(weight_sync: WeightSyncProcess) -> None:
    """Waits for the first snapshot."""
    snapshot = weight_sync.config.parent / "state" / "weight_sync" / f"{weight_sync.run}.weights"
    async with asyncio.timeout(60):
        while not snapshot.exists():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("host_id", [HOST_ID, "another-host"])
async def test_a_server_gets_the_learners_weights_byte_for_byte(
    publisher: WeightPublisher, bus: Bus, run_name: str, host_id: str, outbox: Outbox
) -> None:
    receiver = WeightReceiver(bus, run_name, host_id, "s0")
    assert await receiver.current() is None
    announced: asyncio.Queue[WeightsAvailable] = asyncio.Queue()
    await bus.subscribe(subjects.weights_published(run_name), WeightsAvailable, announced.put)
    await flush(bus.connection.client)

    version = await publisher.publish(weights(1), lineage="a", optimizer_step=0)
    available = await announced.get()
    assert available.manifest.policy_version == version
    assert (available.manifest.lineage, available.manifest.optimizer_step) == ("a", 0)
    assert same(await receiver.fetch(available), weights(1))
    assert same(await receiver.fetch(await newest(receiver)), weights(1))
    (event,) = await outbox.read(10, 0)
    assert event.body == WeightsPublished(version, "a", 0, available.manifest.num_bytes)


async def test_a_learner_on_another_host_is_pulled_from_over_zmq(
    bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    publisher = WeightPublisher(bus, run_name, "learner-host")
    await publisher.publish(weights(2), lineage="a", optimizer_step=0)
    await publisher.close()
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    assert same(await receiver.fetch(await newest(receiver)), weights(2))


async def test_versions_grow_and_a_repeated_step_keeps_its_version(
    publisher: WeightPublisher, redis: StoreConnection, run_name: str, outbox: Outbox
) -> None:
    first = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    second = await publisher.publish(weights(1), lineage="a", optimizer_step=1)
    assert await publisher.publish(weights(1), lineage="a", optimizer_step=1) == second
    third = await publisher.publish(weights(1), lineage="b", optimizer_step=1)
    assert first < second < third
    books = await Versions(redis, run_name).all()
    assert books == {first: ("a", 0), second: ("a", 1), third: ("b", 1)}
    assert len(await outbox.read(10, 0)) == 3


async def test_other_weights_for_a_step_that_has_a_version_are_refused(
    publisher: WeightPublisher,
) -> None:
    await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    with pytest.raises(WeightsNotTakenError, match="new lineage"):
        await publisher.publish(weights(1), lineage="a", optimizer_step=0)


async def test_only_the_newest_versions_are_kept(
    publisher: WeightPublisher, bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    oldest = await newest(receiver)
    mapped = await receiver.fetch(oldest)
    for step in (1, 2, 3):
        await publisher.publish(weights(step), lineage="a", optimizer_step=step)
    assert len([p for p in weight_sync.segments() if ".weight_sync." in p.name]) == 2
    with pytest.raises(Exception, match="no longer held"):
        await receiver.fetch(oldest)
    assert same(mapped, weights(0))


async def test_a_damaged_offer_is_refused_by_tensor_and_the_old_version_stays(
    publisher: WeightPublisher, bus: Bus, run_name: str
) -> None:
    good = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    offsets, num_bytes = layout(weights(1))
    segment = SegmentFolder(run_name, "learner").create(num_bytes)
    entries = fill(segment.data, weights(1), offsets)
    segment.data[offsets[1] + 3] ^= 1
    manifest = WeightManifest(-1, "a", 1, None, entries, num_bytes)
    offer = OfferWeights(manifest, WeightSource(HOST_ID, segment.name, ""))
    with pytest.raises(CallFailedError, match=r"model\.norm\.weight"):
        await bus.request(subjects.offer_weights(run_name), offer, WeightsTaken, timeout_s=60)
    segment.close(delete=True)
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    assert (await newest(receiver)).manifest.policy_version == good


@pytest.mark.parametrize("host_id", [HOST_ID, "another-host"])
async def test_bytes_damaged_on_the_way_are_found_by_the_receiver(
    publisher: WeightPublisher, bus: Bus, run_name: str, host_id: str
) -> None:
    await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    receiver = WeightReceiver(bus, run_name, host_id, "s0")
    available = await newest(receiver)
    entry = available.manifest.tensors[0]
    wrong = msgspec.structs.replace(entry, checksum=entry.checksum ^ 1)
    manifest = msgspec.structs.replace(
        available.manifest, tensors=(wrong, *available.manifest.tensors[1:])
    )
    with pytest.raises(ChecksumError, match=r"model\.embed\.weight"):
        await receiver.fetch(WeightsAvailable(manifest, available.source))


async def test_a_version_damaged_in_memory_is_copied_again_from_the_learner(
    publisher: WeightPublisher, bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    version = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    near, far = (WeightReceiver(bus, run_name, host, host) for host in (HOST_ID, "another-host"))
    available = await newest(near)
    damage(available, at=17)
    for receiver in (near, far):
        with pytest.raises(ChecksumError, match=r"model\.embed\.weight"):
            await receiver.fetch(available)
    failed = WeightsApplied("s0", version, 0.0, 0.0, 0.0, "a wrong checksum", damaged=True)
    await near.report(failed)
    async with asyncio.timeout(60):
        while (repaired := await newest(near)).source == available.source:
            await asyncio.sleep(0.01)
    assert repaired.manifest == available.manifest
    for receiver in (near, far):
        assert same(await receiver.fetch(repaired), weights(0))
        await receiver.close()


async def test_damage_that_cannot_be_repaired_is_told_with_the_remedy(
    publisher: WeightPublisher, bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    version = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    await has_snapshot(weight_sync)
    await publisher.close()  # the learner's copy is gone
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    available = await newest(receiver)
    damage(available, at=17)
    failed = WeightsApplied("s0", version, 0.0, 0.0, 0.0, "a wrong checksum", damaged=True)
    await receiver.report(failed)
    async with asyncio.timeout(60):
        while "damaged weights stay" not in weight_sync.log:
            await asyncio.sleep(0.01)
    assert "restart weight_sync" in weight_sync.log
    weight_sync.kill()
    weight_sync.start()
    assert same(await receiver.fetch(await newest_with(receiver, version)), weights(0))
    await receiver.close()


async def test_reports_become_events_once_and_failures_none(
    publisher: WeightPublisher, bus: Bus, run_name: str, outbox: Outbox
) -> None:
    await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    await outbox.ack([event.seq for event in await outbox.read(10, 0)])
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    await receiver.report(
        WeightsApplied("s0", 1, 0.1, 0.1, 0.1, error="checksum of tensor 'w' is wrong")
    )
    for _ in range(2):
        await receiver.report(WeightsApplied("s0", 1, 0.1, 0.2, 0.3))
    await receiver.report(WeightsApplied("s0", 1, 0.1, 0.2, 0.4))
    found: list[object] = []
    async with asyncio.timeout(60):
        while len(found) < 2:
            found = [event.body for event in await outbox.read(10, 1.0)]
    assert found == [ServerWeightsApplied("s0", 1, 0.3), ServerWeightsApplied("s0", 1, 0.4)]
    await receiver.close()


@pytest.mark.parametrize("memory", ["kept", "lost"])
async def test_a_killed_weight_sync_serves_its_newest_version_again_without_the_learner(
    bus: Bus, run_name: str, weight_sync: WeightSyncProcess, memory: str
) -> None:
    publisher = WeightPublisher(bus, run_name, HOST_ID)
    version = await publisher.publish(weights(5), lineage="a", optimizer_step=5)
    await publisher.close()
    await has_snapshot(weight_sync)
    weight_sync.kill()
    assert weight_sync.segments()
    if memory == "lost":
        for path in weight_sync.segments():
            path.unlink()
    weight_sync.start()
    for host_id in (HOST_ID, "another-host"):
        receiver = WeightReceiver(bus, run_name, host_id, "late")
        assert same(await receiver.fetch(await newest_with(receiver, version)), weights(5))


async def test_a_learner_that_publishes_while_weight_sync_is_away_only_waits(
    publisher: WeightPublisher, weight_sync: WeightSyncProcess
) -> None:
    first = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    weight_sync.kill()
    publishing = asyncio.create_task(publisher.publish(weights(1), lineage="a", optimizer_step=1))
    weight_sync.start()
    assert await publishing == first + 1
    assert await publisher.publish(weights(0), lineage="a", optimizer_step=0) == first


async def test_what_another_life_of_the_run_left_is_not_served(
    publisher: WeightPublisher,
    bus: Bus,
    run_name: str,
    weight_sync: WeightSyncProcess,
    redis: StoreConnection,
) -> None:
    await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    weight_sync.kill()
    prefix = subjects.redis_prefix(run_name)
    await redis.command("DEL", f"{prefix}versions", f"{prefix}version_of", f"{prefix}next_version")
    weight_sync.start()
    assert await WeightReceiver(bus, run_name, HOST_ID, "s0").current() is None
    assert not [path for path in weight_sync.segments() if ".weight_sync." in path.name]


async def test_a_stopped_weight_sync_leaves_no_memory_behind_but_its_snapshot(
    publisher: WeightPublisher, bus: Bus, run_name: str, weight_sync: WeightSyncProcess
) -> None:
    version = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    assert weight_sync.stop() == 0
    assert not [path for path in weight_sync.segments() if ".weight_sync." in path.name]
    weight_sync.start()
    receiver = WeightReceiver(bus, run_name, HOST_ID, "s0")
    assert same(await receiver.fetch(await newest_with(receiver, version)), weights(0))


async def test_a_missed_announcement_comes_again(
    publisher: WeightPublisher, bus: Bus, run_name: str
) -> None:
    version = await publisher.publish(weights(0), lineage="a", optimizer_step=0)
    announced: asyncio.Queue[WeightsAvailable] = asyncio.Queue()
    await bus.subscribe(subjects.weights_published(run_name), WeightsAvailable, announced.put)
    async with asyncio.timeout(60):
        assert (await announced.get()).manifest.policy_version == version


def test_an_impossible_setting_is_told_in_one_line(weight_sync: WeightSyncProcess) -> None:
    weight_sync.kill()
    weight_sync.configure(", keep_versions: 0")
    weight_sync.start()
    assert weight_sync.ended(20) == 2
    last = weight_sync.log.splitlines()[-1]
    assert "keep_versions must be at least 1" in last
    assert last.startswith("error: ")


async def test_another_host_fetches_only_what_changed(
    publisher: WeightPublisher, bus: Bus, run_name: str
) -> None:
    receiver = WeightReceiver(bus, run_name, "another-host", "s0")

    async def fetched(step: int) -> StagedWeights:
        await publisher.publish(stepped(step), lineage="a", optimizer_step=step)
        staged = await receiver.fetch(await newest(receiver))
        assert same(staged, stepped(step))
        return staged

    async def applied(staged: StagedWeights, error: str = "") -> None:
        version = staged.manifest.policy_version
        await receiver.report(WeightsApplied("s0", version, 0.0, 0.0, 0.0, error))

    first = await fetched(0)
    whole = first.manifest.num_bytes
    assert first.num_fetched == whole
    await applied(first)
    second = await fetched(1)
    assert second.num_fetched < 0.05 * whole
    await applied(second, error="it does not fit")  # the server still serves the first version
    third = await fetched(2)  # so this takes two deltas
    assert second.num_fetched < third.num_fetched < 0.05 * whole
    await applied(third)
    other = WeightReceiver(bus, run_name, "a-third-host", "s1")
    assert (await other.fetch(await newest(other))).num_fetched == whole
    await receiver.close()


async def test_wrong_differences_cost_a_fetch_of_the_whole_version(
    publisher: WeightPublisher, bus: Bus, run_name: str
) -> None:
    receiver = WeightReceiver(bus, run_name, "another-host", "s0")
    version = await publisher.publish(stepped(0), lineage="a", optimizer_step=0)
    await receiver.fetch(await newest(receiver))
    await receiver.report(WeightsApplied("s0", version, 0.0, 0.0, 0.0))
    await publisher.publish(stepped(1), lineage="a", optimizer_step=1)
    available = await newest(receiver)
    (delta,) = available.deltas
    wrong = msgspec.structs.replace(delta, entries=delta.entries[:-1], policy_version=99)
    staged = await receiver.fetch(msgspec.structs.replace(available, deltas=(wrong,)))
    assert same(staged, stepped(1))
    assert staged.num_fetched == staged.manifest.num_bytes
    await receiver.close()
