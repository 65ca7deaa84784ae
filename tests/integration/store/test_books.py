"""Outbox, journal, blobs, the model card and versions on a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.store import (
    AppendResult,
    BlobGoneError,
    Blobs,
    Journal,
    Outbox,
    StoreConnection,
    TrajectoryBuffer,
    Versions,
)
from tailrace_protos.episode import Outcome
from tailrace_protos.event import LearnerResumed, RunFinished, RunStarted
from tailrace_protos.weights import ModelCard, WeightManifest
from tests.integration.store.made import group, trajectory, turn


async def test_events_come_in_the_order_emitted_until_they_are_acknowledged(outbox: Outbox) -> None:
    await outbox.emit("scheduler", RunStarted("r", "abc"), RunFinished(1, "done"))
    await outbox.emit("learner", LearnerResumed("l", 0, 0, ""))
    events = await outbox.read(10, 0)
    assert [event.body for event in events] == [
        RunStarted("r", "abc"),
        RunFinished(1, "done"),
        LearnerResumed("l", 0, 0, ""),
    ]
    assert [event.service for event in events] == ["scheduler", "scheduler", "learner"]
    await outbox.ack([events[0].seq])
    assert await outbox.read(10, 0) == events[1:]


async def test_events_are_read_on_while_earlier_ones_wait_for_their_acknowledgement(
    outbox: Outbox,
) -> None:
    for step in range(3):
        await outbox.emit("scheduler", RunFinished(step, "x"))
    first = await outbox.read(1, 0)
    others = await outbox.read(10, 0, first[0].seq)
    assert [event.body for event in others] == [RunFinished(1, "x"), RunFinished(2, "x")]
    assert await outbox.read(10, 0.01, others[-1].seq) == []
    assert await outbox.read(10, 0) == [*first, *others]


async def test_an_event_acknowledged_is_deleted(
    outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    await outbox.emit("scheduler", RunStarted("r", "abc"))
    await outbox.ack([event.seq for event in await outbox.read(10, 0)])
    assert await redis.command("XLEN", f"{{{run_name}}}:outbox") == 0


async def test_an_event_emitted_once_is_not_repeated_by_a_restarted_process(
    outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    await outbox.emit("scheduler", RunFinished(1, "done"), once="finished")
    await Outbox(redis, run_name).emit("scheduler", RunFinished(1, "done"), once="finished")
    assert len(await outbox.read(10, 0)) == 1


async def test_a_reader_wakes_up_when_something_happens(outbox: Outbox) -> None:
    reading = asyncio.create_task(outbox.read(10, 30.0))
    await outbox.emit("scheduler", RunStarted("r", "abc"))
    async with asyncio.timeout(60):
        assert len(await reading) == 1


async def test_the_outbox_takes_more_acknowledgements_than_lua_unpacks(outbox: Outbox) -> None:
    await asyncio.gather(*(outbox.emit("s", *[RunFinished(n, "x")] * 500) for n in range(5)))
    events = await outbox.read(10_000, 0)
    assert len(events) == 2500
    await outbox.ack([event.seq for event in events])
    assert await outbox.read(10, 0) == []


async def test_the_journal_returns_each_turn_once_and_in_order(
    redis: StoreConnection, run_name: str
) -> None:
    journal = Journal(redis, run_name)
    await asyncio.gather(*(journal.append("g.0", turn(number)) for number in (2, 0, 1, 2, 10)))
    assert await journal.load("g.0") == [turn(number) for number in (0, 1, 2, 10)]
    assert await journal.load("g.1") == []


async def test_whoever_loads_a_journal_fences_off_the_worker_before(
    redis: StoreConnection, run_name: str
) -> None:
    stalled, successor = Journal(redis, run_name), Journal(redis, run_name)
    assert await stalled.append("g.0", turn(0)) is AppendResult.APPENDED
    assert await successor.load("g.0") == [turn(0)]
    assert await stalled.append("g.0", turn(1)) is AppendResult.FENCED
    assert await successor.append("g.0", turn(1)) is AppendResult.APPENDED


async def test_a_fenced_worker_learns_whether_its_message_is_played_by_the_other(
    redis: StoreConnection, run_name: str
) -> None:
    first, again = Journal(redis, run_name, "7-1"), Journal(redis, run_name, "7-1")
    await first.append("g.0", turn(0))
    await again.load("g.0")
    assert await first.append("g.0", turn(1)) is AppendResult.REDELIVERED
    assert await first.taken_by("g.0") is AppendResult.REDELIVERED
    await Journal(redis, run_name, "8-1").load("g.0")
    assert await again.append("g.0", turn(1)) is AppendResult.FENCED
    assert await first.taken_by("g.0") is AppendResult.FENCED


async def test_settling_an_episode_ends_its_journal(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    record = group(0, members=2)
    await buffer.record_group(record)
    journal = Journal(redis, run_name)
    for member in (0, 1):
        await journal.append(record.episode_id(member), turn(0))
    await buffer.put_trajectory(trajectory(record, 0))
    assert await journal.append(record.episode_id(0), turn(1)) is AppendResult.SETTLED
    assert await journal.load(record.episode_id(1)) == [turn(0)]
    await buffer.cancel_members(record.group_id, [1], Outcome.TIMEOUT, "late")
    assert await journal.append(record.episode_id(1), turn(1)) is AppendResult.SETTLED
    assert await journal.load(record.episode_id(1)) == []
    assert await redis.command("KEYS", f"{{{run_name}}}:journal:*") == []


async def test_a_blob_is_found_by_its_reference_until_it_expires(
    redis: StoreConnection, run_name: str
) -> None:
    blobs = Blobs(redis, run_name)
    data = bytes(range(256)) * 8192
    ref = await blobs.put(data, 60)
    assert await blobs.get(ref) == data
    assert await blobs.put(data, 60) == ref
    short = await blobs.put(b"soon gone", 0.001)
    await redis.command("DEL", f"{{{run_name}}}:blob:{short}")
    with pytest.raises(BlobGoneError, match=short):
        await blobs.get(short)


async def test_the_model_card_can_be_waited_for(redis: StoreConnection, run_name: str) -> None:
    blobs = Blobs(redis, run_name)
    assert await blobs.get_model_card() is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(blobs.wait_for_model_card(), 0.01)
    card = ModelCard(b"{}", {"tokenizer.json": b"\x00{"})
    waiting = asyncio.create_task(blobs.wait_for_model_card())
    await blobs.put_model_card(card)
    assert await waiting == card


async def test_versions_are_never_reused_and_one_step_has_one_version(
    redis: StoreConnection, run_name: str
) -> None:
    versions = Versions(redis, run_name)
    first = await versions.allocate("a", 1)
    assert await versions.allocate("a", 1) == first
    assert await versions.allocate("a", 2) == first + 1
    assert await versions.allocate("b", 2) == first + 2
    assert await versions.allocate("b", 3, at_least=40) == 40
    assert await versions.allocate("b", 4) == 41


async def test_recorded_versions_tell_lineage_and_step(redis: StoreConnection, run_name: str) -> None:
    versions = Versions(redis, run_name)
    await versions.record(WeightManifest(3, "a", 7, None, (), 0))
    await versions.record(WeightManifest(4, "b", 7, None, (), 0))
    assert await versions.all() == {3: ("a", 7), 4: ("b", 7)}
    assert await versions.of({4, 5}) == {4: ("b", 7)}
    assert await versions.of(()) == {}


async def test_an_episode_that_begins_anew_forgets_its_turns_but_not_its_successors(
    redis: StoreConnection, run_name: str
) -> None:
    stalled, successor = Journal(redis, run_name), Journal(redis, run_name)
    await stalled.append("g.0", turn(0))
    await stalled.clear("g.0")
    assert await stalled.append("g.0", turn(0)) is AppendResult.APPENDED
    assert await successor.load("g.0") == [turn(0)]
    await stalled.clear("g.0")
    assert await Journal(redis, run_name).load("g.0") == [turn(0)]
