"""nats-server is killed and comes back: everything is late, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tailrace.bus import Bus, BusClosedError, CallTimeoutError, StreamLimits
from tailrace.bus.connection import WRITE_BUFFER_BYTES
from tailrace.bus.feed import PullFeed
from tailrace.runtime import Delivery, Service
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, LeaseReply, LeaseRequest, ServerState, ServerStatus
from tailrace_protos.episode import EpisodeTask
from tests.world.consumer import consume
from tests.world.servers import ServerProcess, make_nats_server
from tests.world.serving import (
    endpoints_of,
    eventually,
    eventually_async,
    lease_reply,
    lease_request,
    make_service,
    outgoing,
    serving,
)


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """A nats-server that this test may kill."""
    server = make_nats_server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def own_bus(own_server: ServerProcess, run_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(endpoints_of(own_server.url), name="test", run=run_name)
    await bus.provision_run(run_name, StreamLimits(ack_wait_s=2.0))
    yield bus
    await bus.close()


async def restart(server: ServerProcess, *buses: Bus) -> None:
    """SIGKILL, wait until that was noticed, start again."""
    await asyncio.to_thread(server.kill)
    await eventually(lambda: not any(bus.connection.is_connected for bus in buses))
    await asyncio.to_thread(server.start)


async def test_killed_twice_amid_traffic_nothing_is_lost(
    own_server: ServerProcess, own_bus: Bus
) -> None:
    num_episodes, num_calls = 1500, 200
    service = make_service(own_server.url, own_bus.run)
    handled: Counter[str] = Counter()

    async def work(task: EpisodeTask, _: Delivery) -> None:
        await asyncio.sleep(0.02)
        handled[task.episode_id] += 1

    async def lease(_: LeaseRequest) -> LeaseReply:
        return lease_reply()

    async def produce() -> None:
        for start in range(0, num_episodes, 25):
            await own_bus.publish_durable_many(outgoing(own_bus.run, range(start, start + 25)))
            await asyncio.sleep(0.02)

    async def call() -> None:
        for _ in range(num_calls):
            await own_bus.request(
                subjects.lease(own_bus.run),
                lease_request(),
                LeaseReply,
                timeout_s=1,
                idempotent_retries=30,
            )
            await asyncio.sleep(0.005)

    stream = subjects.episodes_stream(own_bus.run)
    service.pull(stream, "train", EpisodeTask, work, max_in_flight=64, ack_wait_s=2.0)
    service.endpoint(subjects.lease(own_bus.run), LeaseRequest, lease)
    async with serving(service):
        traffic = asyncio.gather(produce(), call())
        for share in (0.2, 0.6):
            await eventually(lambda share=share: len(handled) > share * num_episodes)  # type: ignore[misc]
            await restart(own_server, own_bus, service.bus)
        await asyncio.wait_for(traffic, 120)

        async def is_empty() -> bool:
            return (await own_bus.jetstream.stream_info(stream)).state.messages == 0

        await eventually_async(is_empty, timeout_s=60)
    assert len(handled) == num_episodes
    assert sum(handled.values()) <= num_episodes + 2 * 64  # at most what was in flight ran twice


async def test_work_in_flight_during_an_outage_runs_once(
    own_server: ServerProcess, own_bus: Bus
) -> None:
    service = make_service(own_server.url, own_bus.run)
    released, started, finished = asyncio.Event(), 0, 0

    async def work(_: EpisodeTask, __: Delivery) -> None:
        nonlocal started, finished
        started += 1
        await released.wait()
        finished += 1

    stream = subjects.episodes_stream(own_bus.run)
    service.pull(stream, "train", EpisodeTask, work, max_in_flight=8, ack_wait_s=2.0)
    async with serving(service):
        await own_bus.publish_durable_many(outgoing(own_bus.run, range(8)))
        await eventually(lambda: started == 8)
        await restart(own_server, own_bus, service.bus)
        await own_bus.connection.wait_connected()
        await asyncio.sleep(2.5)  # beyond the ack wait: what is not kept alive would come again
        assert started == 8
        released.set()

        async def is_empty() -> bool:
            return (await own_bus.jetstream.stream_info(stream)).state.messages == 0

        await eventually_async(is_empty)
    assert (started, finished) == (8, 8)


async def test_publishes_registry_and_subscriptions_wait_out_an_outage(
    own_server: ServerProcess, own_bus: Bus
) -> None:
    seen: list[int] = []
    heard: list[int] = []

    async def on_status(status: ServerStatus) -> None:
        seen.append(status.policy_version)

    async def on_activity(activity: AgentActivity) -> None:
        heard.append(activity.num_generating)

    await own_bus.registry.watch(on_status)
    await own_bus.subscribe(subjects.activity(own_bus.run), AgentActivity, on_activity)
    await own_bus.registry.put(status_of(1))
    await eventually(lambda: seen == [1])  # a watch tells only the newest status of an instance
    await asyncio.to_thread(own_server.kill)
    await eventually(lambda: not own_bus.connection.is_connected)
    waiting = asyncio.gather(
        own_bus.registry.put(status_of(2)),
        own_bus.publish(subjects.activity(own_bus.run), AgentActivity("w", 5, 0, 0, 0, 0.0)),
        own_bus.publish_durable_many(outgoing(own_bus.run, range(3))),
        own_bus.registry.all(),
    )
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await asyncio.to_thread(own_server.start)
    await asyncio.wait_for(waiting, 60)
    await eventually(lambda: heard == [5])
    await eventually(lambda: seen[-1] == 2)
    assert [status.policy_version for status in await own_bus.registry.all()] == [2]


async def test_consuming_goes_on_after_an_outage(own_server: ServerProcess, own_bus: Bus) -> None:
    stream = subjects.episodes_stream(own_bus.run)
    received: set[int] = set()

    async def read_all() -> None:
        while len(received) < 20:
            for task, ack in await consume(own_bus, stream, "train", EpisodeTask, 5, 1.0):
                received.add(task.task.seed)
                await ack()

    consuming = asyncio.create_task(read_all())
    await own_bus.publish_durable_many(outgoing(own_bus.run, range(10)))
    await eventually(lambda: len(received) == 10)
    await restart(own_server, own_bus)
    await own_bus.publish_durable_many(outgoing(own_bus.run, range(10, 20)))
    await asyncio.wait_for(consuming, 60)
    assert received == set(range(20))


async def test_a_process_that_starts_before_nats_waits_for_it(
    own_server: ServerProcess, run_name: str
) -> None:
    own_server.kill()
    connecting = asyncio.create_task(
        Bus.connect(endpoints_of(own_server.url), name="early", run=run_name)
    )
    done, _ = await asyncio.wait({connecting}, timeout=0.5)
    assert not done
    await asyncio.to_thread(own_server.start)
    bus = await asyncio.wait_for(connecting, 60)
    await bus.provision_run(run_name)
    await bus.close()


async def working(server: ServerProcess, bus: Bus, drain_s: float) -> tuple[Service, asyncio.Task[int]]:
    """A service with an episode at hand that never ends."""
    service = make_service(server.url, bus.run, drain_s=drain_s)
    started = asyncio.Event()

    async def work(_: EpisodeTask, __: Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    service.pull(subjects.episodes_stream(bus.run), "train", EpisodeTask, work, max_in_flight=8)
    await bus.publish_durable_many(outgoing(bus.run, range(1)))
    task = asyncio.create_task(service.serve())
    await asyncio.wait_for(started.wait(), 60)
    return service, task


async def test_a_drain_without_nats_ends_in_time(own_server: ServerProcess, own_bus: Bus) -> None:
    service, task = await working(own_server, own_bus, drain_s=0.2)
    await asyncio.to_thread(own_server.kill)
    await eventually(lambda: not service.bus.connection.is_connected)
    service.stop("test")
    assert await asyncio.wait_for(task, 60) == 0


async def test_work_in_flight_when_nats_closes_for_good_ends_without_stray_errors(
    own_server: ServerProcess, own_bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    stray: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    service, task = await working(own_server, own_bus, drain_s=0.1)
    await service.bus.connection.client.close()  # as after a refusal by the server
    assert await asyncio.wait_for(task, 60) == 1
    gc.collect()
    assert stray == []
    assert not service.bus.connection.is_connected
    assert "unexpected exception" not in "".join(capsys.readouterr())


async def test_a_server_that_comes_back_with_another_password_ends_the_service(tmp_path: Path) -> None:
    users = tmp_path / "users.conf"
    users.write_text("authorization {users: [{user: u, password: a}]}")
    server = make_nats_server(tmp_path, "users.conf")
    server.start()
    known = replace(endpoints_of(server.url), nats_user="u", nats_password="a")
    bus = await Bus.connect(known, name="t", run="r")
    reasons: list[str] = []
    bus.connection.on_closed = reasons.append
    await asyncio.to_thread(server.kill)
    users.write_text("authorization {users: [{user: u, password: b}]}")
    await asyncio.to_thread(server.start)
    await eventually(lambda: reasons != [])
    assert "refuses user 'u'" in reasons[0]
    with pytest.raises(BusClosedError, match="TAILRACE_NATS_PASSWORD"):
        await bus.publish("subject", status_of(1))
    await bus.close()
    server.kill()


async def test_a_call_ends_in_time_while_nats_takes_no_bytes(
    own_server: ServerProcess, own_bus: Bus
) -> None:
    """It is suspended, and the buffer of the client is full."""
    assert own_server.process is not None
    own_server.process.send_signal(signal.SIGSTOP)
    part = b"x" * 1_000_000
    try:
        for _ in range(2 * WRITE_BUFFER_BYTES // len(part)):
            filling = asyncio.ensure_future(own_bus.connection.publish("filling", part))
            await asyncio.wait({filling}, timeout=0.5)
        async with asyncio.timeout(60):
            with pytest.raises(CallTimeoutError):
                await own_bus.request("nobody", lease_request(), LeaseReply, timeout_s=0.5)
    finally:
        own_server.process.send_signal(signal.SIGCONT)


async def test_a_feed_that_was_never_opened_can_be_closed(own_bus: Bus) -> None:
    feed = PullFeed(own_bus.connection, "stream", "train", lambda _: None, lambda: None)
    await feed.close()
    assert own_bus.connection.is_connected


def status_of(policy_version: int, server_id: str = "s0") -> ServerStatus:
    return ServerStatus(
        server_id=server_id,
        state=ServerState.READY,
        nats_subject="x",
        zmq_endpoint="",
        host_id="h",
        policy_version=policy_version,
        capacity_tokens=1,
        max_running=1,
        num_running=0,
        num_waiting=0,
        num_failed=0,
        idle_s=0.0,
        busy_s=0.0,
        heartbeat_unix_s=0.0,
    )
