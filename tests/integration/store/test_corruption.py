"""Entries of Redis that nobody can decode: set aside, counted, and survived."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import REGISTRY

from tailrace.store import (
    Blobs,
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
from tailrace_protos.weights import ModelCard
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


async def test_an_event_that_was_deleted_before_its_acknowledgement_holds_up_no_other(
    outbox: Outbox, redis: StoreConnection, run_name: str
) -> None:
    told = [RunFinished(step, "done") for step in range(2)]
    await outbox.emit("scheduler", *told)
    first, _ = await outbox.read(10, 0)
    await redis.command("XDEL", f"{{{run_name}}}:outbox", first.seq)
    for _ in range(2):
        assert [event.body for event in await outbox.read(10, 0)] == told[1:]


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


NUMBERS = ("members", "min_valid", "left", "valid", "bytes", "index", "step")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("field", "value"), [*((name, b"x") for name in NUMBERS), ("left", b""), ("phase", b"play")]
)
async def test_a_group_with_a_corrupted_number_is_closed_by_its_next_member(
    field: str, value: bytes, phase: Phase, buffer: TrajectoryBuffer, outbox: Outbox,
    redis: StoreConnection, run_name: str,
) -> None:  # fmt: skip
    """Nothing of it goes to the learner, which does not wait for it."""
    broken, young = group(0, phase=phase), group(1)
    for record in (broken, young):
        await buffer.record_group(record)
    await buffer.begin_groups({broken.group_id: 0, young.group_id: 2})
    for member in (0, 1):
        await buffer.put_trajectory(trajectory(young, member))
    await redis.command("HSET", f"{{{run_name}}}:group:{broken.group_id}", field, value)
    before = counted("open_group")
    for member in (0, 1, 0):
        result = await buffer.put_trajectory(trajectory(broken, member))
        assert result is PutResult.ALREADY_SETTLED
    assert counted("open_group") == before + 1
    assert value in await kept(redis, run_name, "open_group", broken.group_id)
    bodies = [event.body for event in await outbox.read(100, 0)]
    ended = [one for one in bodies if isinstance(one, EpisodeSettled | GroupClosed)][3:]
    num_known = 0 if field == "members" else 2
    for member, one in enumerate(ended[:-1]):
        assert isinstance(one, EpisodeSettled)
        assert (one.group_id, one.member) == (broken.group_id, member)
        assert one.outcome is Outcome.INFRA_FAILURE
    known_phase = "train" if field == "phase" else phase
    closed = GroupClosed(broken.group_id, known_phase, 0, num_known, sent_to_learner=False, num_bytes=0)
    assert ended[num_known:] == [closed]
    (ready,) = await buffer.next_groups(1, 5, old_step=0)
    assert ready.group.group_id == young.group_id
    assert await buffer.open_groups() == []


@pytest.mark.parametrize(("field", "value"), [("left", b"x"), ("phase", b"play"), ("\udcff", b"1")])
async def test_a_new_scheduler_closes_groups_with_a_corrupted_field(
    field: str, value: bytes, buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    broken, other = group(0), group(1)
    for record in (broken, other):
        await buffer.record_group(record)
    name = field.encode(errors="surrogateescape")
    await redis.command("HSET", f"{{{run_name}}}:group:{broken.group_id}", name, value)
    assert [record.group_id for record in await buffer.open_groups()] == [other.group_id]
    assert {name, value} <= {*await kept(redis, run_name, "open_group", broken.group_id)}


@pytest.mark.parametrize("field", ["members", "a1"])
async def test_a_group_with_a_corrupted_number_gets_no_further_attempt(
    field: str, buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    await buffer.record_group(group(0))
    assert await buffer.raise_attempt("train-0", 1, "lost") == 1
    await redis.command("HSET", f"{{{run_name}}}:group:train-0", field, b"x")
    assert await buffer.raise_attempt("train-0", 1, "lost") is None
    assert await buffer.open_groups() == []
    assert b"x" in await kept(redis, run_name, "open_group", "train-0")


async def test_corrupted_ages_and_names_of_groups_hold_up_no_scheduler(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    for index in (0, 1):
        await buffer.record_group(group(index))
    await buffer.begin_groups({"train-0": 3, "train-1": 3})
    await redis.command("ZADD", f"{{{run_name}}}:ages", 1.5, "train-1", "inf", b"\xff")
    await redis.command("ZADD", f"{{{run_name}}}:open", 7, b"\xfe")
    before = counted("age"), counted("open_group")
    for _ in range(2):
        records = await buffer.open_groups()
        assert [(one.group_id, one.begun_step) for one in records] == [("train-0", 3), ("train-1", -1)]
    assert (counted("age"), counted("open_group")) == (before[0] + 2, before[1] + 1)
    assert await kept(redis, run_name, "age", "train-1") == [b"train-1", b"1.5"]


async def test_corrupted_counters_begin_again_and_the_others_stay(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    await buffer.record_group(group(4))
    bad = ("other", b"1", b"\xff", b"1", "accepted_groups", b"1.5")
    await redis.command("HSET", f"{{{run_name}}}:counters", *bad)
    before = counted("counter")
    for _ in range(2):
        counters = await buffer.counters()
        assert (counters.next_group_index, counters.accepted_groups) == (5, 0)
    assert counted("counter") == before + 3
    assert await kept(redis, run_name, "counter", "accepted_groups") == [b"accepted_groups", b"1.5"]
    for member in (0, 1):
        await buffer.put_trajectory(trajectory(group(4), member))
    assert (await buffer.counters()).accepted_groups == 1


COUNTERS = ("accepted_groups", "unconsumed_groups", "unconsumed_bytes", "retained_groups", "num_taken")


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("value", [b"", b"1.5", b"\xff", b"9" * 30])
async def test_a_corrupted_counter_fails_no_settling_taking_or_release(
    counter: str, value: bytes, buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    """Each group goes to the learner once, though places are counted anew."""
    names = await settled_groups(buffer, 3)
    (first,) = await buffer.next_groups(1, 0)
    await redis.command("HSET", f"{{{run_name}}}:counters", counter, value)
    (second,) = await buffer.next_groups(1, 0)
    await buffer.counters()
    (third,) = await buffer.next_groups(1, 0)
    assert [one.group.group_id for one in (first, second, third)] == names
    assert await buffer.next_groups(1, 0) == []
    buffer.rewind()
    assert [one.group.group_id for one in await buffer.next_groups(9, 0)] == names
    await buffer.mark_dropped([first.entry_id, second.entry_id, third.entry_id], "test")
    buffer.rewind()
    assert await buffer.next_groups(9, 0) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"g": "train-0"},
        {"m": "x"},
        {"m": "0"},
        {"m": "1000000"},
        {"i": "x"},
        {"n": "x"},
        {"v": "x"},
        {"v": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("old_step", [-1, 0])
async def test_a_corrupted_entry_of_a_closed_group_holds_up_no_other(
    fields: dict[str, str], old_step: int, buffer: TrajectoryBuffer, redis: StoreConnection,
    run_name: str,
) -> None:  # fmt: skip
    names = await settled_groups(buffer, 2)
    await damage_first_entry(redis, run_name, fields)
    before = counted("group")
    taken = await buffer.next_groups(2, 0, old_step=old_step)
    if "v" in fields:  # its age alone: the group is whole
        assert [one.group.group_id for one in taken] == names
        return
    assert [one.group.group_id for one in taken] == names[1:]
    assert counted("group") == before + 1
    assert b"train-0" in await kept(redis, run_name, "group", "train-0")
    buffer.rewind()
    assert [one.group.group_id for one in await buffer.next_groups(2, 0)] == names[1:]
    counters = await buffer.counters()
    assert (counters.accepted_groups, counters.retained_groups) == (1, 1)
    assert counters.unconsumed_groups == 0


async def test_a_foreign_name_among_the_waiting_groups_holds_up_no_other(
    buffer: TrajectoryBuffer, redis: StoreConnection, run_name: str
) -> None:
    names = await settled_groups(buffer, 1)
    await redis.command("ZADD", f"{{{run_name}}}:waiting", "-1", b"\xff no id")
    assert [one.group.group_id for one in await buffer.next_groups(2, 0)] == names
    buffer.rewind()
    assert [one.group.group_id for one in await buffer.next_groups(2, 0)] == names


async def test_a_group_with_more_members_than_the_stack_of_lua_has_room_for_reaches_the_learner(
    buffer: TrajectoryBuffer,
) -> None:
    record = group(0, members=8200)
    await buffer.record_group(record)
    await asyncio.gather(*(buffer.put_trajectory(trajectory(record, one)) for one in range(8200)))
    (ready,) = await buffer.next_groups(1, 0)
    assert [one.member for one in ready.group.members] == list(range(8200))


async def settled_groups(buffer: TrajectoryBuffer, count: int) -> list[str]:
    """Closed groups of two members, by age."""
    records = [group(index) for index in range(count)]
    for record in records:
        await buffer.record_group(record)
        for member in (0, 1):
            await buffer.put_trajectory(trajectory(record, member))
    return [record.group_id for record in records]


async def damage_first_entry(redis: StoreConnection, run: str, fields: dict[str, str]) -> None:
    """Replace fields of the oldest closed entry, under its own id; with `g`, nothing else stays."""
    stream = f"{{{run}}}:ready"
    ((name, flat), *others) = await redis.command("XRANGE", stream, "-", "+")  # type: ignore[misc]
    whole = dict(zip(map(bytes.decode, flat[::2]), flat[1::2], strict=True))
    made = fields if "g" in fields else whole | fields
    await redis.command("DEL", stream)
    for entry, content in ((name, [part for field in made.items() for part in field]), *others):
        await redis.command("XADD", stream, entry, *content)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_corrupted_model_card_is_waited_for_like_one_that_is_not_there(
    garbage: bytes, redis: StoreConnection, run_name: str
) -> None:
    blobs, card = Blobs(redis, run_name), ModelCard(b"{}", {})
    await redis.command("SET", f"{{{run_name}}}:model_card", garbage)
    before = counted("model_card")
    for _ in range(2):
        assert await blobs.get_model_card() is None
    assert counted("model_card") == before + 1
    assert await kept(redis, run_name, "model_card", "card") == [garbage]
    await Blobs(redis, run_name).put_model_card(card)
    assert await blobs.wait_for_model_card() == card


async def test_a_corrupted_version_is_left_out(redis: StoreConnection, run_name: str) -> None:
    entry = msgspec.msgpack.encode(("lineage", 3))
    await redis.command("HSET", f"{{{run_name}}}:versions", "1", b"\xc1", "x", entry, "2", entry)
    assert await Versions(redis, run_name).all() == {2: ("lineage", 3)}
    assert await Versions(redis, run_name).of((1, 2)) == {2: ("lineage", 3)}


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
