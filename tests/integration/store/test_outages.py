"""A Redis that is killed, full or unwilling."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tailrace.config import ConfigError
from tailrace.store import (
    Journal,
    Outbox,
    PutResult,
    StoreConnection,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TrajectoryBuffer,
    Versions,
    connect,
)
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    CheckpointSaved,
    EpisodeSettled,
    GroupClosed,
    GroupDropped,
    RunFailed,
    RunFinished,
)
from tailrace_protos.weights import WeightManifest
from tests.integration.store.made import group, trajectory, turn
from tests.world.servers import ServerProcess, free_port


async def test_a_redis_killed_in_mid_traffic_only_delays(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    redis = await connect(own_redis_server.url)
    buffer, outbox, journal = (kind(redis, run_name) for kind in (TrajectoryBuffer, Outbox, Journal))
    records = [group(index, members=4) for index in range(40)]

    async def play(index: int) -> None:
        record = records[index]
        await buffer.record_group(record)
        for member in range(4):
            for number in range(5):
                await journal.append(record.episode_id(member), turn(number))
            assert (
                await buffer.put_trajectory(trajectory(record, member)) is not PutResult.UNKNOWN_GROUP
            )
        await outbox.emit("learner", RunFinished(index, "group played"))

    async def consume() -> list[int]:
        indices: list[int] = []
        while len(indices) < len(records):
            indices += [ready.group.group_index for ready in await buffer.next_groups(8, 5.0)]
        return indices

    consuming = asyncio.create_task(consume())
    playing = asyncio.gather(*(play(index) for index in range(40)))
    for _ in range(3):
        reached = redis.pipeline.num_commands + 100
        while redis.pipeline.num_commands < reached and not playing.done():
            await asyncio.sleep(0)
        own_redis_server.kill()
        await asyncio.to_thread(own_redis_server.start)
    async with asyncio.timeout(120):
        await playing
        assert sorted(await consuming) == list(range(40))
    bodies = [event.body for event in await outbox.read(10_000, 0)]
    settled = [body.episode_id for body in bodies if isinstance(body, EpisodeSettled)]
    assert len(settled) == len(set(settled)) == 160
    assert sorted(body.step for body in bodies if isinstance(body, RunFinished)) == list(range(40))
    await redis.aclose()


async def test_a_waiting_reader_survives_a_restart(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    redis = await connect(own_redis_server.url)
    outbox = Outbox(redis, run_name)
    reading = asyncio.create_task(outbox.read(1, 0.2))
    await redis.ping()
    own_redis_server.kill()
    await asyncio.to_thread(own_redis_server.start)
    assert await reading == []
    await outbox.emit("scheduler", RunFinished(1, "x"))
    assert len(await outbox.read(1, 1.0)) == 1
    await redis.aclose()


async def test_another_server_at_the_address_of_redis_only_delays(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    """As on Kubernetes while Redis moves: a proxy, or a pod that has its address by now, answers."""
    redis = await connect(own_redis_server.url)
    own_redis_server.kill()
    asked = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        asked.set()

    other = await asyncio.start_server(refuse, "127.0.0.1", own_redis_server.port)
    emitting = asyncio.create_task(Outbox(redis, run_name).emit("scheduler", RunFinished(1, "x")))
    waiting = asyncio.create_task(redis.wait_for_entry("outbox", "0-0", 0.2))
    async with asyncio.timeout(120):
        await asked.wait()
        await waiting
        other.close()
        await other.wait_closed()
        await asyncio.to_thread(own_redis_server.start)
        await emitting
    assert len(await Outbox(redis, run_name).read(1, 1.0)) == 1
    await redis.aclose()


@pytest.mark.parametrize("cause", ["BUSY", "NOREPLICAS"])
async def test_a_redis_that_refuses_commands_for_a_moment_only_delays(
    cause: str, own_redis_server: ServerProcess, run_name: str
) -> None:
    """It was suspended within a script, or its replicas are away."""
    redis, other = await connect(own_redis_server.url), await connect(own_redis_server.url)
    outbox = Outbox(redis, run_name)
    await outbox.emit("scheduler", RunFinished(0, "before"))
    if cause == "BUSY":
        await other.command("CONFIG", "SET", "busy-reply-threshold", 10)
        holding = asyncio.ensure_future(other.redis.eval("while true do end", 0))
        await _until_refused(other, "PING", cause)
    else:
        await other.command("CONFIG", "SET", "min-replicas-to-write", 1)
        await _until_refused(other, "SET", cause, "key", "value")
    emitting = asyncio.ensure_future(outbox.emit("scheduler", RunFinished(1, "after")))
    waiting = asyncio.ensure_future(redis.wait_for_entry(f"{{{run_name}}}:none", "0-0", 0.1))
    async with asyncio.timeout(120):
        while redis.pipeline.last_failure == "no answer":
            await asyncio.sleep(0.01)
        await waiting
        if cause == "BUSY":
            await other.redis.script_kill()
            await asyncio.gather(holding, return_exceptions=True)
        else:
            await other.command("CONFIG", "SET", "min-replicas-to-write", 0)
        await emitting
    assert [event.body.step for event in await outbox.read(10, 0)] == [0, 1]  # type: ignore[union-attr]
    await redis.aclose()
    await other.aclose()


async def _until_refused(redis: StoreConnection, command: str, reason: str, *arguments: str) -> None:
    async with asyncio.timeout(120):
        while not (await _refusal(redis, command, *arguments)).startswith(reason):
            await asyncio.sleep(0.01)


async def _refusal(redis: StoreConnection, *command: str) -> str:
    try:
        await redis.redis.execute_command(*command)
    except ResponseError as error:
        return str(error)
    return ""


async def test_an_unexpected_error_of_the_connection_reaches_the_callers_and_later_commands_pass(
    own_redis_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = await connect(own_redis_server.url)
    send = redis.pipeline._connection.send_packed_command

    async def send_and_break(*arguments: Any, **named: Any) -> None:
        monkeypatch.undo()
        await send(*arguments, **named)
        raise RuntimeError("handle is closed")

    monkeypatch.setattr(redis.pipeline._connection, "send_packed_command", send_and_break)
    first = asyncio.ensure_future(redis.command("ECHO", "one"))
    await asyncio.sleep(0)  # the first batch is under way
    second = asyncio.ensure_future(redis.command("ECHO", "two"))
    with pytest.raises(StoreError, match="RuntimeError: handle is closed"):
        await first
    assert await second == b"two"
    assert await redis.command("ECHO", "three") == b"three"
    await redis.aclose()


async def test_a_full_redis_is_told_with_the_remedy_and_can_still_be_emptied(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    redis = await connect(own_redis_server.url, full_s=0.3)
    buffer = TrajectoryBuffer(redis, run_name)
    record, second = group(0, members=1, min_valid=1), group(1, members=1, min_valid=1)
    await buffer.record_group(record)
    await buffer.record_group(second)
    await buffer.put_trajectory(trajectory(record, 0, num_tokens=10_000))
    taken = await buffer.next_groups(1, 0)

    await redis.command("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(StoreFullError, match="maxmemory"):
        await buffer.put_trajectory(trajectory(second, 0))
    await buffer.commit_checkpoint([taken[0].entry_id], CheckpointSaved("a", 1, "p", 1))
    assert (await buffer.counters()).retained_bytes == 0

    await redis.command("CONFIG", "SET", "maxmemory", 0)
    assert await buffer.put_trajectory(trajectory(second, 0)) is PutResult.SETTLED
    await redis.aclose()


async def test_the_learner_sees_a_redis_that_its_retained_groups_nearly_fill(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    redis = await connect(own_redis_server.url)
    buffer = TrajectoryBuffer(redis, run_name)
    record = group(0, members=1, min_valid=1)
    await buffer.record_group(record)
    await buffer.put_trajectory(trajectory(record, 0, num_tokens=100_000))
    (taken,) = await buffer.next_groups(1, 0)
    assert not buffer.is_nearly_full
    for share, is_nearly_full in ((1.1, True), (2.0, False), (1.1, True)):
        used = (await redis.redis.info("memory"))["used_memory"]
        await redis.command("CONFIG", "SET", "maxmemory", int(share * used))
        assert await buffer.next_groups(1, 0) == []
        assert buffer.is_nearly_full is is_nearly_full
    await buffer.commit_checkpoint([taken.entry_id], CheckpointSaved("a", 1, "p", 1))
    await buffer.next_groups(1, 0)
    assert not buffer.is_nearly_full
    await redis.aclose()


async def test_decisions_pass_a_full_redis_so_that_its_groups_close_and_the_run_can_end(
    own_redis_server: ServerProcess, run_name: str
) -> None:
    """Else what frees memory waits for memory, behind a step that the waiting episodes must end."""
    redis = await connect(own_redis_server.url, full_s=0.3)
    buffer, outbox = TrajectoryBuffer(redis, run_name), Outbox(redis, run_name)
    versions = Versions(redis, run_name)
    first, second = group(0, members=2, min_valid=1), group(1, members=1, min_valid=1)
    await buffer.record_group(first)
    await buffer.put_trajectory(trajectory(first, 0, num_tokens=10_000))
    await redis.command("CONFIG", "SET", "maxmemory", 1)

    await buffer.begin_groups({first.group_id: 0})
    assert await buffer.raise_attempt(first.group_id, 1, "lost") == 1
    await buffer.record_group(second)
    with pytest.raises(StoreFullError):
        await buffer.put_trajectory(trajectory(first, 1))
    assert await buffer.cancel_members(first.group_id, [1], Outcome.CANCELLED, "late")
    (taken,) = await buffer.next_groups(1, 0)
    assert taken.group.group_id == first.group_id
    version = await versions.allocate("a", 1)
    await versions.record(WeightManifest(version, "a", 1, None, (), 0))
    await outbox.emit("scheduler", RunFailed("stall", 1, "full", "agents"), once="failed")
    assert isinstance((await outbox.read(100, 0))[-1].body, RunFailed)
    await buffer.commit_checkpoint([taken.entry_id], CheckpointSaved("a", 1, "p", 1))
    assert (await buffer.counters()).retained_bytes == 0
    await redis.aclose()


async def test_writes_wait_until_a_full_redis_has_room_and_what_makes_room_overtakes_them(
    own_redis_server: ServerProcess,
) -> None:
    redis = await connect(own_redis_server.url)
    await redis.command("SET", "old", "x" * 100_000)
    await redis.command("CONFIG", "SET", "maxmemory", 1)
    writes = [asyncio.ensure_future(redis.command("RPUSH", "new", number)) for number in range(20)]
    assert await redis.command("DEL", "old") == 1
    assert not any(write.done() for write in writes)
    await redis.command("CONFIG", "SET", "maxmemory", 0)
    assert await asyncio.gather(*writes) == list(range(1, 21)), "in the order issued, each once"
    await redis.aclose()


async def test_closing_ends_writes_that_wait_for_room(own_redis_server: ServerProcess) -> None:
    redis = await connect(own_redis_server.url)
    await redis.command("CONFIG", "SET", "maxmemory", 1)
    write = asyncio.ensure_future(redis.command("SET", "a", "1"))
    await redis.command("GET", "a")
    await redis.aclose()
    with pytest.raises(asyncio.CancelledError):
        await write


async def test_one_refused_command_does_not_disturb_its_neighbours(
    own_redis_server: ServerProcess,
) -> None:
    redis = await connect(own_redis_server.url)
    answers = await asyncio.gather(
        redis.command("SET", "a", "1"),
        redis.command("LPUSH", "a", "2"),
        redis.command("GET", "a"),
        return_exceptions=True,
    )
    assert answers[0] == b"OK"
    assert isinstance(answers[1], StoreError)
    assert "WRONGTYPE" in str(answers[1])
    assert answers[2] == b"1"
    await redis.aclose()


async def test_commands_of_one_tick_share_a_round_trip(own_redis_server: ServerProcess) -> None:
    redis = await connect(own_redis_server.url)
    before = redis.pipeline.num_batches
    await asyncio.gather(*(redis.command("INCR", "n") for _ in range(500)))
    assert redis.pipeline.num_batches - before == 1
    assert await redis.command("GET", "n") == b"500"
    await redis.aclose()


async def test_an_absent_redis_is_named_with_the_remedy() -> None:
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    with pytest.raises(StoreUnavailableError, match="TAILRACE_REDIS_URL") as caught:
        await connect(url, wait_s=0.1)
    assert "secret" not in str(caught.value)


async def test_an_outage_longer_than_allowed_fails_the_callers(own_redis_server: ServerProcess) -> None:
    redis = await connect(own_redis_server.url, outage_s=2.0)
    own_redis_server.kill()
    answers = await asyncio.gather(*(redis.ping() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreUnavailableError] * 3
    own_redis_server.start()
    await redis.ping()
    await redis.aclose()


async def test_wrong_credentials_are_the_users_mistake(own_redis_server: ServerProcess) -> None:
    redis = await connect(own_redis_server.url)
    await redis.command("CONFIG", "SET", "requirepass", "right")
    await redis.aclose()
    for user in ("", ":wrong@"):
        url = own_redis_server.url.replace("redis://", f"redis://{user}")
        with pytest.raises(ConfigError, match="password"):
            await connect(url, wait_s=60.0)


async def test_a_redis_that_accepts_and_never_answers_is_told_with_a_reason() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", port := free_port())
    redis = StoreConnection(f"redis://127.0.0.1:{port}/0", outage_s=0.05)
    redis.pipeline._answer_s = 0.05
    with pytest.raises(StoreUnavailableError, match=r"\(TimeoutError\)") as caught:
        await redis.ping()
    assert caught.value.reason == "TimeoutError"
    await redis.aclose()
    silent.close()


REASON = "lost by Redis"


async def test_groups_of_lost_writes_are_closed_and_not_trained(
    redis: StoreConnection, buffer: TrajectoryBuffer, outbox: Outbox, run_name: str
) -> None:
    """One that the scheduler has open, one that only Redis has, one that was sent to the learner."""
    ghost = group(0, members=3)
    await buffer.record_group(ghost)
    await buffer.put_trajectory(trajectory(ghost, 1))
    for _ in range(2):
        for group_id, is_sent in (("train-0", False), ("lost", False), ("sent", True)):
            await buffer.forget_group(group_id, "train", 2, is_sent=is_sent, reason=REASON)
    await buffer.forget_group("eval-lost", "eval", 2, is_sent=False, reason=REASON)
    events = [event.body for event in await outbox.read(100, 0)][2:]
    closed = [one for one in events if isinstance(one, GroupClosed)]
    assert [(one.group_id, one.phase, one.num_members) for one in closed] == [
        ("train-0", "train", 3), ("lost", "train", 2), ("eval-lost", "eval", 2),
    ]  # fmt: skip
    assert not any(one.sent_to_learner or one.num_valid for one in closed)
    dropped = [one.group_id for one in events if isinstance(one, GroupDropped)]
    assert dropped == ["train-0", "lost", "sent", "sent"]
    assert await buffer.group_ids() == (frozenset(), frozenset())
    assert await redis.command("EXISTS", f"{{{run_name}}}:data:train-0") == 0


async def test_groups_whose_end_is_on_its_way_are_not_forgotten(
    buffer: TrajectoryBuffer, outbox: Outbox
) -> None:
    sent, unsent = group(0), group(1, min_valid=3)
    for record in (sent, unsent):
        await buffer.record_group(record)
        for member in (0, 1):
            await buffer.put_trajectory(trajectory(record, member))
    assert await buffer.group_ids() == (frozenset(), {sent.group_id})
    num_events = len(await outbox.read(100, 0))
    for record in (sent, unsent):
        await buffer.forget_group(record.group_id, "train", 2, is_sent=False, reason=REASON)
    assert len(await outbox.read(100, 0)) == num_events
    (ready,) = await buffer.next_groups(1, 0)
    assert ready.group.group_id == sent.group_id
