"""Working actors: acknowledged after the work, kept alive during it, buried when hopeless."""

from __future__ import annotations

import asyncio

import pytest
from nats.js.api import RawStreamMsg

from tailrace import tracing
from tailrace.bus import Bus, StreamLimits
from tailrace.bus.feed import PullFeed
from tailrace.runtime import Delivery, HandBack, LeftToAnother, Service
from tailrace.runtime.settlement import Settlement
from tailrace_protos import subjects
from tailrace_protos.episode import EpisodeTask
from tests.world.samples import sample
from tests.world.servers import ServerProcess
from tests.world.serving import episode, eventually, eventually_async, make_service, outgoing, serving


@pytest.fixture
async def calm_bus(bus: Bus) -> Bus:
    """With streams; a message comes again when its worker says so, not because this process is slow."""
    await bus.provision_run(bus.run)  # an ack wait of 30 s
    return bus


async def num_queued(bus: Bus) -> int:
    info = await bus.jetstream.stream_info(subjects.episodes_stream(bus.run))
    return int(info.state.messages)


async def emptied(bus: Bus) -> None:
    """Return once the queue is empty: nats-server works an acknowledgement off after it has read it."""

    async def is_empty() -> bool:
        return await num_queued(bus) == 0

    await eventually_async(is_empty)


async def dead_letter(bus: Bus) -> RawStreamMsg:
    """The newest dead episode, once there is one."""
    stream = subjects.dead_stream(bus.run)

    async def is_there() -> bool:
        return (await bus.jetstream.stream_info(stream)).state.messages > 0

    await eventually_async(is_there)
    return await bus.jetstream.get_last_msg(stream, subjects.dead_episodes(bus.run))


def pull(service: Service, bus: Bus, handler: object, **options: object) -> None:
    service.pull(  # type: ignore[call-arg]
        subjects.episodes_stream(bus.run),
        "train",
        EpisodeTask,
        handler,  # type: ignore[arg-type]
        **{"max_in_flight": 16, "ack_wait_s": 1.0, **options},  # type: ignore[arg-type]
    )


async def test_every_message_is_handled_and_leaves_the_queue(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    handled: list[str] = []

    async def handler(task: EpisodeTask, delivery: Delivery) -> None:
        assert delivery.num_delivered == 1
        assert delivery.message_id == f"{calm_bus.run}.{task.message_id}"
        handled.append(task.episode_id)

    pull(service, calm_bus, handler)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(300)))
        await eventually(lambda: len(handled) == 300)
    assert sorted(handled) == sorted(f"g{number}.0" for number in range(300))
    await emptied(calm_bus)


async def test_no_more_handlers_run_than_allowed_and_the_rest_stays_queued(
    run_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, run_bus.run, drain_s=0.1)
    running, most, released = 0, 0, asyncio.Semaphore(0)

    async def handler(_: EpisodeTask, __: Delivery) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await released.acquire()
        running -= 1

    pull(service, run_bus, handler, max_in_flight=7)
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(30)))
    async with serving(service):
        await eventually(lambda: running == 7)
        info = await run_bus.jetstream.consumer_info(subjects.episodes_stream(run_bus.run), "train")
        assert info.num_ack_pending == 7
        assert info.num_pending == 23
        for _ in range(30):
            released.release()

        await emptied(run_bus)
    assert most == 7


async def test_heartbeats_keep_a_long_handler_from_redelivery(
    run_bus: Bus, nats_server: ServerProcess
) -> None:
    ack_wait_s = 3.0  # heartbeats every second
    await run_bus.provision_run(run_bus.run, StreamLimits(ack_wait_s=ack_wait_s))
    service = make_service(nats_server.url, run_bus.run)
    other = make_service(nats_server.url, run_bus.run, name="other")
    deliveries: list[int] = []
    done = asyncio.Event()

    async def handler(_: EpisodeTask, delivery: Delivery) -> None:
        deliveries.append(delivery.num_delivered)
        await asyncio.sleep(2.5 * ack_wait_s)
        done.set()

    pull(service, run_bus, handler, ack_wait_s=ack_wait_s)
    pull(other, run_bus, handler, ack_wait_s=ack_wait_s)
    async with serving(service), serving(other):
        await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))
        await asyncio.wait_for(done.wait(), 60)
    assert deliveries == [1]
    await emptied(run_bus)


async def test_work_whose_acknowledgement_was_lost_is_acknowledged_again_not_done_again(
    run_bus: Bus, nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(nats_server.url, run_bus.run)
    deliveries: list[int] = []
    acknowledge, lost = Settlement.ack, asyncio.Event()

    async def lose_the_first(self: Settlement, delivery: Delivery) -> None:
        if lost.is_set():
            await acknowledge(self, delivery)
        lost.set()

    async def handler(_: EpisodeTask, delivery: Delivery) -> None:
        deliveries.append(delivery.num_delivered)

    monkeypatch.setattr(Settlement, "ack", lose_the_first)
    pull(service, run_bus, handler)
    async with serving(service):
        await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))
        await asyncio.wait_for(lost.wait(), 60)
        assert await num_queued(run_bus) == 1
        await emptied(run_bus)
    assert deliveries == [1]


async def test_an_exception_means_again_and_after_the_last_delivery_a_dead_letter(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    deliveries: list[int] = []

    async def handler(_: EpisodeTask, delivery: Delivery) -> None:
        deliveries.append(delivery.num_delivered)
        raise ZeroDivisionError("poison")

    pull(service, calm_bus, handler, max_deliveries=2)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        letter = await dead_letter(calm_bus)
        await emptied(calm_bus)
    assert deliveries == [1, 2]
    headers = letter.headers or {}
    assert headers["Tailrace-Dead-Error"] == "TooManyDeliveries"
    assert headers["Tailrace-Dead-Reason"] == "ZeroDivisionError: poison"
    assert headers["Tailrace-Dead-Subject"] == subjects.episodes(calm_bus.run, "train")
    assert b"g0.0" in (letter.data or b"")


async def test_a_handler_that_awaits_a_cancelled_task_is_not_called_for_ever(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    deliveries: list[int] = []

    async def handler(_: EpisodeTask, delivery: Delivery) -> None:
        deliveries.append(delivery.num_delivered)
        other = asyncio.create_task(asyncio.Event().wait())
        other.cancel()
        await other

    pull(service, calm_bus, handler, max_deliveries=2)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        letter = await dead_letter(calm_bus)
    assert deliveries == [1, 2]
    assert (letter.headers or {})["Tailrace-Dead-Reason"] == "CancelledError: CancelledError"


async def test_a_handler_that_cancels_its_own_task_fails_and_is_not_called_for_ever(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    deliveries: list[int] = []

    async def handler(_: EpisodeTask, delivery: Delivery) -> None:
        deliveries.append(delivery.num_delivered)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.cancel()
        await asyncio.sleep(60)

    pull(service, calm_bus, handler, max_deliveries=2)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        await dead_letter(calm_bus)
    assert deliveries == [1, 2]
    await emptied(calm_bus)


async def test_a_dead_letter_takes_a_reason_that_is_no_text(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)

    async def handler(_: EpisodeTask, __: Delivery) -> None:
        raise ValueError("a lone \ud800")

    pull(service, calm_bus, handler, max_deliveries=1)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        letter = await dead_letter(calm_bus)
    assert (letter.headers or {})["Tailrace-Dead-Reason"] == "ValueError: a lone ?"


async def test_a_message_that_kills_its_workers_is_buried_unopened(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    pulling = await calm_bus.jetstream.pull_subscribe_bind(
        "train", subjects.episodes_stream(calm_bus.run)
    )
    await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
    for _ in range(2):  # two workers that died without a word
        (message,) = await pulling.fetch(1, timeout=60)
        await message.nak()
    service = make_service(nats_server.url, calm_bus.run)
    handled: list[str] = []

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        handled.append(task.episode_id)

    pull(service, calm_bus, handler, max_deliveries=2)
    async with serving(service):
        letter = await dead_letter(calm_bus)
    assert (letter.headers or {})["Tailrace-Dead-Deliveries"] == "3"
    assert handled == []


async def test_a_malformed_message_is_buried_at_once_and_the_next_is_handled(
    calm_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    handled: list[str] = []

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        handled.append(task.episode_id)

    pull(service, calm_bus, handler)
    async with serving(service):
        await calm_bus.jetstream.publish(subjects.episodes(calm_bus.run, "train"), b"\x00\xff garbage")
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        letter = await dead_letter(calm_bus)
        await eventually(lambda: handled == ["g0.0"])
    assert (letter.headers or {})["Tailrace-Dead-Error"] == "MalformedMessageError"
    assert letter.data == b"\x00\xff garbage"
    await emptied(calm_bus)


async def test_hand_backs_never_make_a_dead_letter(calm_bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, calm_bus.run)
    num_seen, done = 0, asyncio.Event()

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen < 8:
            raise HandBack(0.01)
        assert task == episode(0)
        done.set()

    pull(service, calm_bus, handler, max_deliveries=2)
    async with serving(service):
        await calm_bus.publish_durable_many(outgoing(calm_bus.run, range(1)))
        await asyncio.wait_for(done.wait(), 60)
    assert num_seen == 8
    await emptied(calm_bus)
    assert (
        await calm_bus.jetstream.stream_info(subjects.dead_stream(calm_bus.run))
    ).state.messages == 0


async def test_a_message_that_another_worker_has_is_not_acknowledged_for_it(
    run_bus: Bus, nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = make_service(nats_server.url, run_bus.run)
    other = make_service(nats_server.url, run_bus.run, name="other")
    begun, taken, told, ended = (asyncio.Event() for _ in range(4))
    beat = Settlement.heartbeat

    async def stall(self: Settlement, delivery: Delivery) -> None:
        if delivery.num_delivered > 1:
            await beat(self, delivery)

    async def loses(_: EpisodeTask, __: Delivery) -> None:
        begun.set()
        await taken.wait()
        raise LeftToAnother

    async def takes(_: EpisodeTask, delivery: Delivery) -> None:
        assert delivery.num_delivered == 2
        taken.set()
        await told.wait()
        ended.set()

    def num_left() -> float:
        actor = f"pull:{subjects.episodes_stream(run_bus.run)}/train"
        return sample("tailrace_runtime_handled_total", actor=actor, outcome="left")

    monkeypatch.setattr(Settlement, "heartbeat", stall)
    pull(stalled, run_bus, loses, max_in_flight=1)
    pull(other, run_bus, takes, max_in_flight=1)
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))
    async with serving(stalled):
        await asyncio.wait_for(begun.wait(), 60)
        async with serving(other):
            await eventually(lambda: num_left() == 1)
            assert await num_queued(run_bus) == 1
            told.set()
            await asyncio.wait_for(ended.wait(), 60)
            await emptied(run_bus)


async def test_a_hand_back_at_the_limit_waits_for_a_place_in_a_full_queue(
    bus: Bus, nats_server: ServerProcess
) -> None:
    await bus.provision_run(bus.run, StreamLimits(max_queued_episodes=2, ack_wait_s=1.0))
    stream = subjects.episodes_stream(bus.run)
    service = make_service(nats_server.url, bus.run)
    deliveries: list[str] = []
    traces: list[str] = []
    done = asyncio.Event()

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        deliveries.append(task.episode_id)
        traces.append(tracing.current_traceparent())
        if len(deliveries) == 1:
            raise HandBack
        done.set()

    def num_refusals() -> float:
        return sample("tailrace_bus_publish_retries_total", reason="full")

    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with tracing.span("test", traceparent):
        await bus.publish_durable_many(outgoing(bus.run, range(2)))
    before = num_refusals()
    pull(service, bus, handler, max_in_flight=1, max_deliveries=1)
    async with serving(service):
        await eventually(lambda: num_refusals() >= before + 4)
        await bus.jetstream.delete_msg(stream, 2)
        await asyncio.wait_for(done.wait(), 60)
    assert deliveries == ["g0.0", "g0.0"]
    assert traces == [traceparent, traceparent]  # the copy belongs to the same trace
    dead = await bus.jetstream.stream_info(subjects.dead_stream(bus.run))
    assert dead.state.messages == 0


async def test_a_drain_finishes_what_it_can_and_hands_the_rest_to_another_worker(
    run_bus: Bus, nats_server: ServerProcess
) -> None:
    await run_bus.provision_run(run_bus.run)  # an ack wait of 30 s: redelivery would be too late
    leaving = make_service(nats_server.url, run_bus.run, drain_s=0.3)
    started, finished = 0, 0

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        nonlocal started, finished
        started += 1
        await (leaving.draining.wait() if task.group_id == "g0" else asyncio.Event().wait())
        finished += 1

    pull(leaving, run_bus, handler, ack_wait_s=30.0)
    await run_bus.publish_durable_many(outgoing(run_bus.run, range(5)))
    async with serving(leaving) as task:
        await eventually(lambda: started == 5)
        leaving.stop("test")
        assert await task == 0
    assert finished == 1

    taking = make_service(nats_server.url, run_bus.run)
    taken: dict[str, int] = {}

    async def take(task: EpisodeTask, delivery: Delivery) -> None:
        taken[task.episode_id] = delivery.num_delivered

    pull(taking, run_bus, take, ack_wait_s=30.0)
    async with serving(taking):
        await eventually(lambda: len(taken) == 4, timeout_s=60)
    assert taken == {f"g{number}.0": 2 for number in range(1, 5)}
    await emptied(run_bus)


async def test_a_worker_that_starts_before_its_queue_exists_waits_for_it(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    handled: list[str] = []

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        handled.append(task.episode_id)

    pull(service, bus, handler)
    async with serving(service):
        await bus.provision_run(bus.run)
        await bus.publish_durable_many(outgoing(bus.run, range(1)))
        await eventually(lambda: len(handled) > 0)
    assert handled == ["g0.0"]


@pytest.mark.parametrize("method", ["ask", "heartbeat"])
async def test_a_worker_goes_on_after_an_unexpected_failure_of_its_connection(
    method: str, run_bus: Bus, nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = PullFeed if method == "ask" else Settlement
    working, num_calls = getattr(owner, method), 0

    async def broken_once(*arguments: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ConnectionResetError
        await working(*arguments)

    monkeypatch.setattr(owner, method, broken_once)
    service = make_service(nats_server.url, run_bus.run)
    handled: list[str] = []

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        handled.append(task.episode_id)
        await eventually(lambda: num_calls > 2)

    pull(service, run_bus, handler)
    async with serving(service):
        await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))
        await eventually(lambda: bool(handled))
        await eventually(lambda: num_calls > 2)
    assert handled == ["g0.0"]


async def test_a_message_of_a_stream_that_was_made_anew_is_not_one_of_the_old_stream(
    run_bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, run_bus.run)
    handled: list[str] = []
    go_on = asyncio.Event()

    async def handler(task: EpisodeTask, _: Delivery) -> None:
        handled.append(task.episode_id)
        await go_on.wait()

    pull(service, run_bus, handler)
    async with serving(service):
        await run_bus.publish_durable_many(outgoing(run_bus.run, range(1)))
        await eventually(lambda: handled == ["g0.0"])
        await run_bus.jetstream.delete_stream(subjects.episodes_stream(run_bus.run))
        await run_bus.provision_run(run_bus.run)
        await run_bus.publish_durable_many(outgoing(run_bus.run, range(1, 2)))
        await eventually(lambda: handled == ["g0.0", "g1.0"])
        go_on.set()
    assert handled == ["g0.0", "g1.0"]
