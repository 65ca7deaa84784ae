"""Callable actors: every accepted request gets one answer, whatever happens to it."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.aio.msg import Msg
from nats.micro.request import Request

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.bus.calls import error_in
from tailrace.runtime.endpoint import EndpointActor, EndpointSpec
from tailrace.runtime.guard import Guard
from tailrace_protos.base import Message, encode
from tailrace_protos.control import LeaseReply, LeaseRequest
from tailrace_protos.generation import CallErrorCode, TokenChunk
from tests.world.samples import sample
from tests.world.servers import ServerProcess
from tests.world.serving import eventually, lease_reply, lease_request, make_service, serving


async def test_a_request_is_answered_by_the_handler(bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(request: LeaseRequest) -> LeaseReply:
        return lease_reply(f"for {request.worker_id}")

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        reply = await bus.request(f"{bus.run}.call", lease_request("me"), LeaseReply, timeout_s=60)
    assert reply.leases[0].server_id == "for me"


async def test_a_malformed_request_is_answered_400_with_the_expected_type(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(_: LeaseRequest) -> LeaseReply:
        return lease_reply()

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        raw = await bus.connection.client.request(f"{bus.run}.call", b"\xc1 nonsense", timeout=60)
        assert (raw.headers or {})["Nats-Service-Error-Code"] == "400"
        with pytest.raises(CallFailedError, match="malformed LeaseRequest") as caught:
            await bus.request(f"{bus.run}.call", TokenChunk("c"), LeaseReply, timeout_s=60)
        assert caught.value.code is CallErrorCode.INVALID
        await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)


@pytest.mark.parametrize(
    "payload",
    [
        encode({"type": "x\r\nNats-Service-Error-Code: 200\r\n\r\n"}),
        encode({"type": "lease_request", "x": 0})[:-1] + b"\x91" * 100_000,
    ],
    ids=["line_breaks", "nested"],
)
async def test_a_hostile_request_gets_its_refusal(
    bus: Bus, nats_server: ServerProcess, payload: bytes
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(_: LeaseRequest) -> LeaseReply:
        return lease_reply()

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        answer = await bus.connection.client.request(f"{bus.run}.call", payload, timeout=60)
    assert not answer.data
    assert (answer.headers or {})["Nats-Service-Error-Code"] == "400"
    assert "malformed LeaseRequest" in (answer.headers or {})["Nats-Service-Error"]


async def test_a_full_mailbox_answers_503_with_retry_after(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)
    released = asyncio.Event()

    async def handler(_: LeaseRequest) -> LeaseReply:
        await released.wait()
        return lease_reply()

    subject = f"{bus.run}.call"
    service.endpoint(subject, LeaseRequest, handler, mailbox=2, concurrency=1)
    async with serving(service):
        calls = [
            asyncio.create_task(bus.request(subject, lease_request(), LeaseReply, timeout_s=60))
            for _ in range(3)
        ]
        labels = {"actor": f"endpoint:{subject}"}
        await eventually(lambda: sample("tailrace_runtime_mailbox_messages", **labels) == 2)
        raw = await bus.connection.client.request(subject, encode(lease_request()), timeout=60)
        assert (raw.headers or {})["Nats-Service-Error-Code"] == "503"
        assert float((raw.headers or {})["Retry-After"]) > 0
        with pytest.raises(CallFailedError, match="mailbox full") as caught:
            await bus.request(subject, lease_request(), LeaseReply, timeout_s=60)
        assert caught.value.code is CallErrorCode.OVERLOADED
        assert caught.value.retry_after_s > 0
        assert sample("tailrace_runtime_handled_total", outcome="rejected", **labels) == 2
        released.set()
        assert len(await asyncio.gather(*calls)) == 3


async def test_retries_wait_out_a_full_worker(bus: Bus, nats_server: ServerProcess) -> None:
    service = make_service(nats_server.url, bus.run)
    attempts = 0

    async def handler(_: LeaseRequest) -> LeaseReply:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise CallFailedError(CallErrorCode.NOT_READY, "no weights yet", retry_after_s=0.02)
        return lease_reply()

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        with pytest.raises(CallFailedError, match="no weights yet") as caught:
            await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)
        assert caught.value.code is CallErrorCode.NOT_READY
        assert caught.value.retry_after_s == 0.02
        await bus.request(
            f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60, idempotent_retries=3
        )
    assert attempts == 3


async def test_an_exception_in_a_handler_is_answered_counted_and_survived(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(request: LeaseRequest) -> LeaseReply:
        if request.worker_id == "bad":
            raise KeyError("surprise")
        return lease_reply()

    subject = f"{bus.run}.call"
    service.endpoint(subject, LeaseRequest, handler)
    async with serving(service):
        with pytest.raises(CallFailedError, match=r"KeyError.*surprise") as caught:
            await bus.request(subject, lease_request("bad"), LeaseReply, timeout_s=60)
        assert caught.value.code is CallErrorCode.INTERNAL
        await bus.request(subject, lease_request("good"), LeaseReply, timeout_s=60)
    failures = sample("tailrace_runtime_failures_total", where=f"endpoint:{subject}", error="KeyError")
    assert failures == 1


@pytest.mark.parametrize("text", ["a lone \ud800", "x" * 2_000_000], ids=["surrogate", "long"])
async def test_an_error_of_any_text_is_an_answer(
    bus: Bus, nats_server: ServerProcess, text: str
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(_: LeaseRequest) -> LeaseReply:
        raise CallFailedError(CallErrorCode.INVALID, text)

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        with pytest.raises(CallFailedError) as caught:
            await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)
    assert caught.value.code is CallErrorCode.INVALID


async def test_a_reply_too_big_for_the_bus_is_a_clear_internal_error(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run)

    async def handler(_: LeaseRequest) -> Message:
        return lease_reply("x" * 2_000_000)

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        with pytest.raises(CallFailedError, match="claim check") as caught:
            await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)
    assert caught.value.code is CallErrorCode.INTERNAL


async def test_who_is_not_there_and_who_does_not_answer_are_told_apart(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run, drain_s=0.1)

    async def handler(_: LeaseRequest) -> LeaseReply:
        await asyncio.Event().wait()
        return lease_reply()

    service.endpoint(f"{bus.run}.slow", LeaseRequest, handler)
    async with serving(service):
        with pytest.raises(CallTimeoutError, match=r"slow' within 0\.1 s"):
            await bus.request(f"{bus.run}.slow", lease_request(), LeaseReply, timeout_s=0.1)
        with pytest.raises(NoResponderError):
            await bus.request(f"{bus.run}.nobody", lease_request(), LeaseReply, timeout_s=60)


async def test_a_drain_answers_running_calls_and_refuses_the_rest(
    bus: Bus, nats_server: ServerProcess
) -> None:
    service = make_service(nats_server.url, bus.run, drain_s=0.2)
    stuck = asyncio.Event()

    async def handler(request: LeaseRequest) -> LeaseReply:
        await (stuck.wait() if request.worker_id == "stuck" else service.draining.wait())
        return lease_reply()

    subject = f"{bus.run}.call"
    service.endpoint(subject, LeaseRequest, handler, concurrency=2)
    async with serving(service) as task:
        names = ("quick", "stuck")
        calls = [
            asyncio.create_task(bus.request(subject, lease_request(name), LeaseReply, timeout_s=60))
            for name in names
        ]
        await eventually(
            lambda: sample("tailrace_runtime_running_handlers", actor=f"endpoint:{subject}") == 2
        )
        service.stop("test")
        assert (await calls[0]).leases
        with pytest.raises(CallFailedError, match="shutting down") as caught:
            await calls[1]
        assert caught.value.code is CallErrorCode.NOT_READY
        assert await task == 0
    with pytest.raises(NoResponderError):
        await bus.request(subject, lease_request(), LeaseReply, timeout_s=60)


async def test_a_request_after_a_drain_that_could_not_unsubscribe_is_refused(bus: Bus) -> None:
    num_handled = 0

    async def handler(_: LeaseRequest) -> LeaseReply:
        nonlocal num_handled
        num_handled += 1
        return lease_reply()

    spec = EndpointSpec("call", LeaseRequest, handler, "", mailbox=8, concurrency=8)
    actor = EndpointActor(spec, bus, Guard(lambda *_: None))
    await actor.drain(asyncio.Event())
    client = bus.connection.client
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    message = Msg(_client=client, subject="call", reply=inbox, data=encode(lease_request()))
    await actor._accept(Request(message))  # nats-py has subscribed again
    error = error_in((await replies.next_msg(timeout=5)).headers, "call")
    assert error is not None
    assert error.code is CallErrorCode.NOT_READY
    assert num_handled == 0


async def test_services_are_found_and_counted_by_nats_micro(
    bus: Bus, nats_server: ServerProcess
) -> None:
    name = f"svc-{bus.run}"
    service = make_service(nats_server.url, bus.run, name=name)

    async def handler(_: LeaseRequest) -> LeaseReply:
        return lease_reply()

    service.endpoint(f"{bus.run}.call", LeaseRequest, handler)
    async with serving(service):
        await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)
        client = bus.connection.client
        ping = json.loads((await client.request(f"$SRV.PING.{name}", timeout=60)).data)
        assert ping["metadata"]["run"] == bus.run
        info = json.loads((await client.request(f"$SRV.INFO.{name}", timeout=60)).data)
        assert info["endpoints"][0]["metadata"]["request"] == "LeaseRequest"
        stats = json.loads((await client.request(f"$SRV.STATS.{name}", timeout=60)).data)
        assert stats["endpoints"][0]["data"]["num_ok"] == 1


async def test_instances_share_the_requests_of_one_subject(
    bus: Bus, nats_server: ServerProcess
) -> None:
    services = [make_service(nats_server.url, bus.run) for _ in range(2)]
    answered = [0, 0]

    def handler_of(index: int) -> object:
        async def handler(_: LeaseRequest) -> LeaseReply:
            answered[index] += 1
            return lease_reply()

        return handler

    for index, service in enumerate(services):
        service.endpoint(f"{bus.run}.call", LeaseRequest, handler_of(index))  # type: ignore[arg-type]
    async with serving(services[0]), serving(services[1]):
        for _ in range(60):
            await bus.request(f"{bus.run}.call", lease_request(), LeaseReply, timeout_s=60)
    assert sum(answered) == 60
    assert min(answered) > 0
