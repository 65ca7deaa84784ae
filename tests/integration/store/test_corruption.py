"""Entries of Redis that nobody can decode: set aside, counted, and survived."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import REGISTRY

from tailrace.store import (
    Journal,
    Outbox,
    OutsideEpisodes,
    PutResult,
    StoreConnection,
    TrajectoryBuffer,
    Versions,
)
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeSettled, GroupClosed, RunFinished
from tailrace_protos.session import OpenSession, OutsideOffer, OutsideResult, SessionLimits
from tailrace_protos.subjects import PHASES, Phase
from tests.integration.store.made import group, trajectory, turn

GARBAGE = [b"", b"\xc1", b"\x81\xa4type\xa5other", b"\xff" * 1000, b"\x91" * 5000]


def counted(kind: str) -> float:
    """Corrupted entries of a kind that this process has found."""
    return REGISTRY.get_sample_value("tailrace_store_corrupted_entries_total", {"kind": kind}) or 0.0


async def kept(redis: StoreConnection, run: str, kind: str, name: str) -> list[bytes]:
    """The bytes that were set aside."""
    data = await redis.command("GET", f"{{{run}}}:quarantine:{kind}:{name}")
    assert isinstance(data, bytes)
    return msgspec.msgpack.decode(data, type=tuple[str, list[bytes]])[1]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_corrupted_event_holds_up_no_other(
    garbage: bytes, outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    before = counted("event")
    bad = await redis.command("XADD", f"{{{run_name}}}:outbox", "*", "s", "learner", "b", garbage)
    await redis.command("XADD", f"{{{run_name}}}:outbox", "*", "only", "one")
    await outbox.emit("scheduler", RunFinished(1, "done"))
    assert [event.body for event in await outbox.read(10, 0)] == [RunFinished(1, "done")]
    assert counted("event") == before + 2
    assert isinstance(bad, bytes)
    assert garbage in await kept(redis, run_name, "event", bad.decode())
    assert await redis.command("XLEN", f"{{{run_name}}}:outbox") == 1


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_group_with_a_corrupted_trajectory_goes_back_to_the_credit(
    garbage: bytes, buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    for index in (0, 1, 2):
        record = group(index)
        await buffer.record_group(record)
        for member in (0, 1):
            await buffer.put_trajectory(trajectory(record, member))
    await redis.command("HSET", f"{{{run_name}}}:data:train-0", "1", garbage)
    await redis.command("HDEL", f"{{{run_name}}}:data:train-1", "0")
    taken = await buffer.next_groups(3, 0)
    assert [ready.group.group_id for ready in taken] == ["train-2"]
    assert garbage in await kept(redis, run_name, "group", "train-0")
    counters = await buffer.counters()
    assert (counters.accepted_groups, counters.retained_groups) == (1, 1)


async def test_a_group_whose_entry_is_gone_does_not_stop_the_learner(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    for index in (0, 1):
        record = group(index)
        await buffer.record_group(record)
        for member in (0, 1):
            await buffer.put_trajectory(trajectory(record, member))
    entries = await redis.command("XRANGE", f"{{{run_name}}}:ready", "-", "+")
    await redis.command("XDEL", f"{{{run_name}}}:ready", entries[0][0])  # type: ignore[index]
    assert [ready.group.group_id for ready in await buffer.next_groups(2, 0)] == ["train-1"]
    buffer.rewind()
    assert [ready.group.group_id for ready in await buffer.next_groups(2, 0)] == ["train-1"]


@pytest.mark.parametrize("garbage", [GARBAGE[0], GARBAGE[1], GARBAGE[3]], ids=range(3))
async def test_a_corrupted_journal_lets_its_episode_begin_again(
    garbage: bytes, buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    record = group(0)
    await buffer.record_group(record)
    journal = Journal(redis, run_name)
    await journal.load(record.episode_id(0))
    await journal.append(record.episode_id(0), turn(0))
    await redis.command("HSET", f"{{{run_name}}}:journal:{record.episode_id(0)}", "1", garbage)
    assert await Journal(redis, run_name).load(record.episode_id(0)) == []
    assert garbage in await kept(redis, run_name, "journal", record.episode_id(0))
    again = Journal(redis, run_name)
    assert await again.load(record.episode_id(0)) == []
    assert await again.append(record.episode_id(0), turn(0)) == "appended"


@pytest.mark.parametrize("phase", PHASES)
async def test_a_corrupted_open_group_is_closed_with_all_its_members(
    phase: Phase, buffer: TrajectoryBuffer, outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    broken, other = (group(index, phase=phase, members=3) for index in (0, 1))
    for record in (broken, other):
        await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(broken, 1))
    await redis.command("HSET", f"{{{run_name}}}:group:{broken.group_id}", "record", b"\xc1")
    for _ in range(2):
        assert [record.group_id for record in await buffer.open_groups()] == [other.group_id]
    bodies = [event.body for event in await outbox.read(100, 0)]
    settled = {body.member: body.outcome for body in bodies if isinstance(body, EpisodeSettled)}
    failed = Outcome.INFRA_FAILURE
    assert settled == {0: failed, 1: Outcome.OK, 2: failed}
    assert [body for body in bodies if isinstance(body, GroupClosed)] == [
        GroupClosed(broken.group_id, phase, 0, 3, sent_to_learner=False, num_bytes=0)
    ]
    assert await buffer.put_trajectory(trajectory(broken, 0)) is PutResult.ALREADY_SETTLED
    assert await redis.command("EXISTS", f"{{{run_name}}}:data:{broken.group_id}") == 0


@pytest.mark.parametrize("members", [b"9" * 12, b"-1", b"", b"\xff"])
async def test_a_corrupted_number_of_members_costs_nothing(
    members: bytes, buffer: TrajectoryBuffer, outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    await buffer.record_group(group(0))
    key = f"{{{run_name}}}:group:train-0"
    await redis.command("HSET", key, "record", b"\xc1", "members", members)
    assert await buffer.open_groups() == []
    bodies = [event.body for event in await outbox.read(100, 0)]
    assert bodies[1:] == [GroupClosed("train-0", "train", 0, 0, sent_to_learner=False, num_bytes=0)]


async def test_the_learner_does_not_wait_for_a_corrupted_group(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    old, young = group(0), group(1)
    for record in (old, young):
        await buffer.record_group(record)
    await buffer.begin_groups({old.group_id: 0, young.group_id: 2})
    for member in (0, 1):
        await buffer.put_trajectory(trajectory(young, member))
    assert await buffer.next_groups(1, 0, old_step=0) == []
    await redis.command("HSET", f"{{{run_name}}}:group:{old.group_id}", "record", b"\xc1")
    await buffer.open_groups()
    (ready,) = await buffer.next_groups(1, 5, old_step=0)
    assert ready.group.group_id == young.group_id


async def test_a_corrupted_version_is_left_out(redis: StoreConnection, run_name: str) -> None:
    entry = msgspec.msgpack.encode(("lineage", 3))
    await redis.command("HSET", f"{{{run_name}}}:versions", "1", b"\xc1", "x", entry, "2", entry)
    assert await Versions(redis, run_name).all() == {2: ("lineage", 3)}


def offer(index: int) -> OutsideOffer:
    """An episode for agents outside of the cluster."""
    opening = OpenSession(f"train-{index}.0", SessionLimits(64, 64, 2e9))
    return OutsideOffer(opening, f"train-{index}", 0, "train", "rows", {}, 60.0, 60.0)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_corrupted_offer_fails_its_episode_and_the_agent_gets_the_next(
    garbage: bytes, redis: StoreConnection, run_name: str
) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    for index in (0, 1):
        await episodes.offer(offer(index))
    await redis.command("HSET", f"{{{run_name}}}:outside:train-0.0", "offer", garbage)
    leased = await episodes.lease("agent")
    assert leased is not None
    assert leased.offer == offer(1)
    result = (await episodes.progress(["train-0.0"]))["train-0.0"].result
    assert result is not None
    assert result.outcome is Outcome.INFRA_FAILURE
    assert (await kept(redis, run_name, "offer", "train-0.0"))[0] == garbage


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_corrupted_result_holds_up_no_other(
    garbage: bytes, redis: StoreConnection, run_name: str
) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    given = OutsideResult(rewards={"": 0.5})
    for index in (0, 1):
        await episodes.offer(offer(index))
        assert await episodes.settle(f"train-{index}.0", given) == "taken"
    await redis.command("HSET", f"{{{run_name}}}:outside:train-0.0", "result", garbage)
    found = await episodes.progress(["train-0.0", "train-1.0"])
    failed = found["train-0.0"].result
    assert failed is not None
    assert failed.outcome is Outcome.INFRA_FAILURE
    assert found["train-1.0"].result == given
    assert await kept(redis, run_name, "result", "train-0.0") == [garbage]


@pytest.mark.parametrize("garbage", [b"", b"soon", b"nan", b"\xff"])
async def test_a_corrupted_time_of_a_lease_holds_up_no_other(
    garbage: bytes, redis: StoreConnection, run_name: str
) -> None:
    episodes = OutsideEpisodes(redis, run_name)
    for index in (0, 1):
        await episodes.offer(offer(index))
        assert await episodes.lease(f"agent-{index}") is not None
    await redis.command("HSET", f"{{{run_name}}}:outside:train-0.0", "started", garbage)
    found = await episodes.progress(["train-0.0", "train-1.0"])
    failed = found["train-0.0"].result
    assert failed is not None
    assert failed.outcome is Outcome.INFRA_FAILURE
    assert found["train-1.0"].started_unix_s is not None
    assert await kept(redis, run_name, "first lease", "train-0.0") == [garbage]
    await episodes.offer(offer(2))
    leased = await episodes.lease("agent-0")  # it had the corrupted one
    assert leased is not None
    assert leased.offer == offer(2)
