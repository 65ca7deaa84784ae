"""A Redis that is killed, full or unwilling."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
    connect,
)
from tailrace_protos.event import CheckpointSaved, EpisodeSettled, RunFinished
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
    async with asyncio.timeout(30):
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
    async with asyncio.timeout(30):
        await asked.wait()
        await waiting
        other.close()
        await other.wait_closed()
        await asyncio.to_thread(own_redis_server.start)
        await emitting
    assert len(await Outbox(redis, run_name).read(1, 1.0)) == 1
    await redis.aclose()


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
    redis = await connect(own_redis_server.url, outage_s=0.1)
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
            await connect(url, wait_s=5.0)


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
