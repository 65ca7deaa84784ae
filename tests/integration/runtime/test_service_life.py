"""Subscriptions, loops, hooks, readiness, traces: a service from start to exit code."""

from __future__ import annotations

import asyncio

import pytest

from tailrace import tracing
from tailrace.bus import Bus
from tailrace.config import ConfigError
from tailrace.runtime import Delivery, Failure, Service, StopService
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, LeaseReply, LeaseRequest
from tailrace_protos.episode import EpisodeTask
from tests.world.samples import sample
from tests.world.servers import ServerProcess, free_port
from tests.world.serving import episode, eventually, lease_reply, lease_request, make_service, serving


def activity(number: int) -> AgentActivity:
    return AgentActivity("w", number, 0, 0, 0, 0.0)


async def http_get(
    port: int, path: str, request: str = "GET {} HTTP/1.1\r\nHost: x\r\n\r\n"
) -> tuple[int, str]:
    """Status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.format(path).encode())
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return (int(head.split(" ")[1]) if head else 0), body


async def test_messages_are_heard_in_order_and_failures_and_garbage_do_not_stop_that(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    heard: list[int] = []

    async def handler(message: AgentActivity) -> None:
        await asyncio.sleep(0)
        if message.num_generating == 50:
            raise RuntimeError("surprise")
        heard.append(message.num_generating)

    subject = subjects.activity(bus.run)
    service.subscribe(subject, AgentActivity, handler)
    async with serving(service):
        for number in range(100):
            await bus.publish(subject, activity(number))
        await bus.connection.publish(subject, b"\xc1")
        await bus.publish(subject, activity(100))
        await eventually(lambda: bool(heard) and heard[-1] == 100)
    assert heard == [number for number in range(101) if number != 50]
    counted = {
        outcome: sample("tailrace_runtime_handled_total", actor=f"subscribe:{subject}", outcome=outcome)
        for outcome in ("ok", "failed", "malformed")
    }
    assert counted == {"ok": 100, "failed": 1, "malformed": 1}


async def test_a_subscription_far_behind_loses_nothing(bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, bus.run)
    released = asyncio.Event()
    heard = 0

    async def handler(_: AgentActivity) -> None:
        nonlocal heard
        await released.wait()
        heard += 1

    subject = subjects.activity(bus.run)
    service.subscribe(subject, AgentActivity, handler, mailbox=10)
    async with serving(service):
        for number in range(20_000):
            await bus.publish(subject, activity(number))
        waiting = "tailrace_runtime_mailbox_messages"
        await eventually(lambda: sample(waiting, actor=f"subscribe:{subject}") == 19_999)
        released.set()
        await eventually(lambda: heard == 20_000)
    assert sample("tailrace_bus_dropped_messages_total", subject=subject) == 0


async def test_a_failing_loop_is_restarted_and_a_returning_one_is_not(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    starts, done = [], asyncio.Event()

    async def failing() -> None:
        starts.append("failing")
        if len([name for name in starts if name == "failing"]) < 3:
            raise OSError("disk")
        done.set()

    async def returning() -> None:
        starts.append("returning")

    service.loop("failing", failing)
    service.loop("returning", returning)
    async with serving(service):
        await asyncio.wait_for(done.wait(), 60)
    assert starts.count("failing") == 3
    assert starts.count("returning") == 1
    assert sample("tailrace_runtime_failures_total", where="loop:failing", error="OSError") == 2


async def test_stop_service_ends_it_with_its_exit_code(bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, bus.run)

    async def body() -> None:
        raise StopService(7, "enough")

    service.loop("body", body)
    async with serving(service) as task:
        assert await asyncio.wait_for(task, 60) == 7


async def test_a_config_error_at_the_start_exits_2_and_an_unexpected_one_exits_1(
    bus: Bus, nats_server: ServerProcess
) -> None:
    async def wrong() -> None:
        raise ConfigError("agents.max_turns: must be positive")

    async def broken() -> None:
        raise KeyError("bug")

    for hook, exit_code in ((wrong, 2), (broken, 1)):
        service = make_service(nats_server.url, bus.run)
        service.on_start(hook)
        assert await asyncio.wait_for(service.serve(), 60) == exit_code


async def test_hooks_run_in_order_and_in_reverse_with_the_bus_there(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    ran: list[str] = []

    def hook(name: str) -> None:
        async def run() -> None:
            await service.bus.publish(subjects.activity(bus.run), activity(0))
            ran.append(name)

        (service.on_start if name.startswith("start") else service.on_drain)(run)

    for name in ("start 1", "start 2", "drain 1", "drain 2"):
        hook(name)
    async with serving(service):
        pass
    assert ran == ["start 1", "start 2", "drain 2", "drain 1"]


async def test_a_service_waiting_in_a_start_hook_can_be_stopped(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    waiting = asyncio.Event()

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    service.on_start(wait_for_ever)
    task = asyncio.create_task(service.serve())
    await asyncio.wait_for(waiting.wait(), 60)
    service.stop("test")
    assert await asyncio.wait_for(task, 60) == 0


async def test_handlers_may_be_declared_while_serving(bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(_: LeaseRequest) -> LeaseReply:
        return lease_reply()

    async with serving(service):
        service.endpoint(f"{bus.run}.late", LeaseRequest, handler)
        reply = await bus.request(
            f"{bus.run}.late", lease_request(), LeaseReply, timeout_s=60, idempotent_retries=5
        )
    assert reply == lease_reply()


async def test_a_spawned_task_that_fails_is_a_counted_failure(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def fails() -> int:
        raise LookupError("gone")

    async def works() -> int:
        return 3

    async with serving(service):
        assert await service.spawn(works(), "works") == 3
        failure = await service.spawn(fails(), "fails")
        hanging = service.spawn(asyncio.sleep(3600), "hangs")
    assert isinstance(failure, Failure)
    assert (failure.where, failure.error_type, failure.reason) == ("task:fails", "LookupError", "gone")
    assert hanging.cancelled()


async def test_the_metrics_port_tells_life_readiness_and_metrics(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    async with serving(service) as task:
        port = service.health.port
        assert (await http_get(port, "/livez")) == (200, "ok\n")
        assert (await http_get(port, "/readyz")) == (200, "ok\n")
        status, text = await http_get(port, "/metrics")
        assert status == 200
        assert "tailrace_bus_connected 1.0" in text
        assert (await http_get(port, "/nothing"))[0] == 404
        assert (await http_get(port, "", request="rubbish\r\n\r\n"))[0] == 0
        service.set_ready(False)
        assert (await http_get(port, "/readyz")) == (503, "starting\n")
    assert task.result() == 0
    with pytest.raises(OSError, match="onnect"):
        await http_get(port, "/livez")


async def test_a_busy_metrics_port_is_the_users_mistake(
    bus: Bus, nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    holder = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    monkeypatch.setenv("TAILRACE_METRICS_PORT", str(port))
    service = make_service(nats_server.url, bus.run)
    assert await asyncio.wait_for(service.serve(), 60) == 2
    holder.close()


async def test_a_trace_goes_from_caller_through_a_call_and_a_queue_to_the_worker(
    run_bus: Bus, nats_server: ServerProcess
) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    service: Service = make_service(nats_server.url, run_bus.run)
    seen: list[str] = []
    done = asyncio.Event()

    async def admit(_: LeaseRequest) -> LeaseReply:
        seen.append(tracing.current_traceparent())
        subject = subjects.episodes(run_bus.run, "train")
        await service.bus.publish_durable(subject, episode(0), message_id="m")
        return lease_reply()

    async def work(_: EpisodeTask, __: Delivery) -> None:
        seen.append(tracing.current_traceparent())
        done.set()

    service.endpoint(f"{run_bus.run}.admit", LeaseRequest, admit)
    service.pull(subjects.episodes_stream(run_bus.run), "train", EpisodeTask, work, max_in_flight=4)
    async with serving(service):
        with tracing.span("test", traceparent):
            await run_bus.request(f"{run_bus.run}.admit", lease_request(), LeaseReply, timeout_s=60)
        await asyncio.wait_for(done.wait(), 60)
    assert seen == [traceparent, traceparent]
    assert tracing.current_traceparent() == ""
