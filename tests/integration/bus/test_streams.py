"""Streams, durable publishes, consumers and the registry on a real nats-server."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.msg import Msg

from tailrace.bus import Bus, OversizedMessageError, StreamLimits, StreamMissingError
from tailrace.bus.calls import ReplyInbox
from tailrace.bus.durable import DurablePublisher, Outgoing
from tailrace.config import ConfigError
from tailrace_protos import subjects
from tailrace_protos.control import ServerStatus
from tailrace_protos.episode import EpisodeTask
from tests.integration.bus.test_outages import status_of
from tests.world.consumer import consume
from tests.world.samples import sample
from tests.world.servers import ServerProcess, make_nats_server
from tests.world.serving import endpoints_of, episode, eventually, outgoing


async def num_messages(bus: Bus, stream: str) -> int:
    return int((await bus.jetstream.stream_info(stream)).state.messages)


async def test_provisioning_twice_keeps_messages_and_applies_new_limits(bus: Bus) -> None:
    await bus.provision_run(bus.run)
    await bus.publish_durable_many(outgoing(bus.run, range(5)))
    await bus.provision_run(bus.run)
    await bus.provision_run(
        bus.run, StreamLimits(max_queued_episodes=77, max_ack_pending=5, ack_wait_s=9.0)
    )
    stream = subjects.episodes_stream(bus.run)
    info = await bus.jetstream.stream_info(stream)
    assert (info.state.messages, info.config.max_msgs) == (5, 77)
    for phase in subjects.PHASES:
        config = (await bus.jetstream.consumer_info(stream, phase)).config
        assert config.filter_subject == subjects.episodes(bus.run, phase)
        assert (config.max_ack_pending, config.ack_wait, config.max_deliver) == (5, 9.0, -1)


async def test_a_foreign_stream_of_the_same_name_is_the_users_to_remove(bus: Bus) -> None:
    stream = subjects.episodes_stream(bus.run)
    await bus.jetstream.add_stream(name=stream, subjects=[f"{bus.run}.other"])
    with pytest.raises(ConfigError, match=f"nats stream rm {stream}"):
        await bus.provision_run(bus.run)


async def test_a_message_id_is_stored_once(run_bus: Bus) -> None:
    items = outgoing(run_bus.run, range(10))
    await run_bus.publish_durable_many(items)
    await run_bus.publish_durable_many(items)
    assert await num_messages(run_bus, subjects.episodes_stream(run_bus.run)) == 10


async def test_more_than_a_window_of_messages_arrives_in_order(run_bus: Bus) -> None:
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(1300)))
    stream = subjects.episodes_stream(run_bus.run)
    assert await num_messages(run_bus, stream) == 1300
    received: list[int] = []
    while len(received) < 1300:
        batch = await consume(run_bus, stream, "train", EpisodeTask, 400, 5)
        received += [task.task.seed for task, _ in batch]
        for _, ack in batch:
            await ack()
    assert received == list(range(1300))


async def test_a_full_queue_delays_the_publisher_until_there_is_room(bus: Bus) -> None:
    await bus.provision_run(bus.run, StreamLimits(max_queued_episodes=3))
    before = sample("tailrace_bus_publish_retries_total", reason="full")
    publishing = asyncio.create_task(bus.publish_durable_many(outgoing(bus.run, range(5))))
    await eventually(lambda: sample("tailrace_bus_publish_retries_total", reason="full") > before)
    assert not publishing.done()
    stream = subjects.episodes_stream(bus.run)
    received: set[int] = set()
    while len(received) < 5:
        for task, ack in await consume(bus, stream, "train", EpisodeTask, 5, 2):
            received.add(task.task.seed)
            await ack()
    await asyncio.wait_for(publishing, 60)
    assert received == set(range(5))


async def test_a_stream_that_never_appears_is_an_error_with_the_remedy(bus: Bus) -> None:
    inbox = ReplyInbox(bus.connection)
    await inbox.open()
    publisher = DurablePublisher(bus.connection, inbox, missing_after_s=0.2)
    with pytest.raises(StreamMissingError, match="is it running") as caught:
        await publisher.publish([Outgoing(f"{bus.run}.nowhere", b"", {})])
    assert caught.value.subject == f"{bus.run}.nowhere"


async def test_an_oversized_message_is_refused_here_and_the_connection_lives_on(run_bus: Bus) -> None:
    subject = subjects.activity(run_bus.run)
    for num_bytes in (1_048_570, 2_000_000):  # the first only together with its header
        with pytest.raises(OversizedMessageError, match="claim check") as caught:
            await run_bus.connection.publish(
                subject, b"x" * num_bytes, headers={"traceparent": "0" * 55}
            )
        error = caught.value
        assert (error.subject, error.max_bytes) == (subject, 1_048_576)
        assert error.num_bytes > 1_048_576
    big = "x" * 2_000_000
    with pytest.raises(OversizedMessageError):
        await run_bus.publish_durable(f"{run_bus.run}.events", [big], message_id="m")
    await run_bus.connection.publish(subject, b"x" * 1_048_576)
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))


async def test_consumed_messages_come_again_until_acknowledged(run_bus: Bus) -> None:
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(2)))
    stream = subjects.episodes_stream(run_bus.run)
    first = await consume(run_bus, stream, "train", EpisodeTask, 2, 5)
    assert [task for task, _ in first] == [episode(0), episode(1)]
    await first[0][1]()
    again: list[tuple[EpisodeTask, object]] = []
    async with asyncio.timeout(60):
        while not again:
            again = list(await consume(run_bus, stream, "train", EpisodeTask, 2, 1))
    assert [task for task, _ in again] == [episode(1)]


async def test_the_registry_keeps_the_newest_entry_of_every_server(run_bus: Bus) -> None:
    seen: list[tuple[str, int]] = []

    async def on_status(status: ServerStatus) -> None:
        seen.append((status.server_id, status.policy_version))

    await run_bus.registry.put(status_of(1, "a"))
    await run_bus.registry.watch(on_status)
    assert seen == [("a", 1)]
    await run_bus.registry.put(status_of(2, "a"))
    await run_bus.registry.put(status_of(2, "b"))
    await eventually(lambda: seen == [("a", 1), ("a", 2), ("b", 2)])
    await run_bus.connection.publish(f"$KV.{subjects.registry_bucket(run_bus.run)}.c", b"\xc1 garbage")
    await run_bus.registry.put(status_of(3, "b"))
    await eventually(lambda: seen[-1] == ("b", 3))
    assert [(s.server_id, s.policy_version) for s in await run_bus.registry.all()] == [
        ("a", 2),
        ("b", 3),
    ]


async def test_the_registry_of_a_run_without_streams_is_empty(bus: Bus) -> None:
    assert await bus.registry.all() == []


async def test_what_a_full_subscription_drops_is_counted(bus: Bus) -> None:
    subject = subjects.activity(bus.run)
    blocked = asyncio.Event()

    async def receive(_: Msg) -> None:
        await blocked.wait()

    await bus.connection.client.subscribe(subject, cb=receive, pending_msgs_limit=1)
    for _ in range(10):
        await bus.connection.publish(subject, b"")
    await eventually(lambda: sample("tailrace_bus_dropped_messages_total", subject=subject) >= 8)
    blocked.set()
    assert sample("tailrace_bus_dropped_messages_total", subject=subject) <= 9  # one is being received


async def test_wrong_credentials_are_the_users_mistake(
    tmp_path_factory: pytest.TempPathFactory, run_name: str
) -> None:
    directory = tmp_path_factory.mktemp("secured")
    allowed = f'{{ publish: [">"], subscribe: ["_INBOX.agents.>", "{run_name}.>"] }}'
    user = f"{{ user: agents, password: right, permissions: {allowed} }}"
    (directory / "users.conf").write_text(f"authorization {{ users: [{user}] }}\n")
    server: ServerProcess = make_nats_server(directory, include="users.conf")
    server.start()
    try:
        with pytest.raises(ConfigError, match="TAILRACE_NATS_PASSWORD"):
            await Bus.connect(endpoints_of(server.url, "agents", "wrong"), name="t")
        bus = await Bus.connect(endpoints_of(server.url, "agents", "right"), name="t", run=run_name)
        await bus.provision_run(run_name)  # replies come to `_INBOX.agents.>`, all that is allowed
        await bus.publish_durable_many(outgoing(run_name, range(1)))
        await bus.close()
    finally:
        server.kill()


async def test_a_missing_stream_is_named_beside_a_full_one(bus: Bus) -> None:
    await bus.provision_run(bus.run, StreamLimits(max_queued_episodes=1))
    await bus.publish_durable_many(outgoing(bus.run, range(1)))
    inbox = ReplyInbox(bus.connection)
    await inbox.open()
    publisher = DurablePublisher(bus.connection, inbox, missing_after_s=0.2)
    full, missing = subjects.episodes(bus.run, "train"), f"{bus.run}.nowhere"
    with pytest.raises(StreamMissingError) as caught:
        await publisher.publish([Outgoing(full, b"", {}), Outgoing(missing, b"", {})])
    assert caught.value.subject == missing


async def test_a_replay_of_the_registry_that_fails_after_a_reconnection_is_in_the_log(
    run_bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = asyncio.Event()

    async def on_status(_: ServerStatus) -> None:
        if failed.is_set():
            raise LookupError("no place for it")

    await run_bus.registry.watch(on_status)
    await run_bus.registry.put(status_of(1))
    failed.set()
    log = ""
    for listener in run_bus.connection.on_restored:
        listener()
    async with asyncio.timeout(60):
        while "LookupError" not in log:
            await asyncio.sleep(0.005)
            log += "".join(capsys.readouterr())
    assert "registry" in log


async def test_dead_letters_of_a_stream_that_was_made_anew_are_stored_beside_those_of_the_old(
    run_bus: Bus,
) -> None:
    def message(stored_ns: int) -> Msg:
        reply = f"$JS.ACK.episodes.train.5.1.1.{stored_ns}.0"
        return Msg(run_bus.connection.client, subjects.episodes(run_bus.run, "train"), reply, b"x")

    for stored_ns in (10, 20, 20):
        subject = subjects.dead_episodes(run_bus.run)
        await run_bus.dead_letters.store(message(stored_ns), subject, "reason")
    assert await num_messages(run_bus, subjects.dead_stream(run_bus.run)) == 2
