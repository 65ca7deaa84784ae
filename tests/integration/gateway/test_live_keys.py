"""Keys of the section `gateway`: changing one changes what callers of a real gateway see."""

from __future__ import annotations

import asyncio
import time

import pytest

from tailrace.channel import Address, ChunkSink, NatsGenerateServer
from tailrace_gateway import __main__ as process
from tailrace_protos import subjects
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk
from tailrace_protos.session import SessionOpened
from tailrace_protos.subjects import redis_prefix
from tests.world.byte_model import model_card
from tests.world.gateway import ADMIN_KEY, GatewayWorld
from tests.world.scripted_model import ScriptedModel
from tests.world.servers import free_port
from tests.world.serving import eventually

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}


class Aborting(ScriptedModel):
    """Aborts every call without a token."""

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        sink.send(TokenChunk(request.call_id, finish_reason=FinishReason.ABORT))


async def test_advertised_url(empty_world: GatewayWorld) -> None:
    """Replicas return this URL instead of the listener's own."""
    world = empty_world
    await world.start_gateway()
    own = await world.open("g0.0")
    await world.start_gateway("gateway-1", advertised_url="http://gateway.here:8000/")
    urls = {own.base_url}
    while len(urls) < 2:
        urls.add((await world.open("g0.1")).base_url)
    assert urls - {own.base_url} == {"http://gateway.here:8000/v1"}


async def test_service_url(empty_world: GatewayWorld) -> None:
    """Services get this URL; a client over HTTP gets the advertised one."""
    port, outside = free_port(), "https://gateway.example.org"
    own = f"http://127.0.0.1:{port}"
    await empty_world.start_gateway(port=port, advertised_url=outside, service_url=f"{own}/")
    opened = await empty_world.open()
    assert opened.base_url == f"{own}/v1"
    answer = await empty_world.http(opened, ADMIN_KEY).post("sessions", json={})
    assert answer.json()["base_url"] == f"{outside}/v1"


async def test_host(empty_world: GatewayWorld) -> None:
    await empty_world.start_gateway(host="127.0.0.2")
    opened = await empty_world.open()
    assert opened.base_url.startswith("http://127.0.0.2:")
    assert (await empty_world.http(opened).post("chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(("drain_s", "status"), [(0.1, 503), (20.0, 200)])
async def test_drain_s(empty_world: GatewayWorld, drain_s: float, status: int) -> None:
    """A call that ends within this time after SIGTERM is answered, a longer one is ended."""
    world = empty_world
    world.model.hold = True
    gateway = await world.start_gateway(drain_s=drain_s)
    client = world.http(await world.open())
    call = asyncio.create_task(client.post("chat/completions", json=CHAT))
    await eventually(lambda: world.model.num_held == 1)
    gateway.stop("end of test")
    if drain_s > 1:
        await asyncio.sleep(0.5)
        world.model.release()
    assert (await asyncio.wait_for(call, 60)).status_code == status


async def test_keep_alive_s(empty_world: GatewayWorld) -> None:
    world = empty_world
    await world.start_gateway(keep_alive_s=1)
    opened = await world.open()
    port = int(opened.base_url.removesuffix("/v1").rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer ")
    writer.write(opened.api_key.encode() + b"\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n")
    await asyncio.wait_for(reader.read(), 60)  # returns when the gateway closes the connection
    writer.close()


@pytest.mark.parametrize("session_keep_s", [50.0, 3600.0])
async def test_session_keep_s(empty_world: GatewayWorld, session_keep_s: float) -> None:
    world = empty_world
    await world.start_gateway(session_keep_s=session_keep_s)
    await world.open(timeout_s=60)
    pattern = f"{redis_prefix(world.run)}session*"
    keys = await world.redis.pipeline.command("KEYS", pattern)
    assert keys
    lives_s = [await world.redis.pipeline.command("TTL", key.decode()) for key in keys]
    for life_s in lives_s:
        assert session_keep_s < life_s <= session_keep_s + 60.0


@pytest.mark.parametrize("session_idle_s", [0.05, 300.0])
async def test_session_idle_s(
    empty_world: GatewayWorld, session_idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is dropped gives its server back, and is read again by its next call."""
    world = empty_world
    monkeypatch.setattr(process, "_REAP_INTERVAL_S", 0.02)
    await world.start_gateway(session_idle_s=session_idle_s)
    client = world.http(await world.open())
    assert (await client.post("chat/completions", json=CHAT)).status_code == 200
    if session_idle_s > 1:
        await eventually(lambda: bool(world.scheduler.activities))
        assert world.scheduler.released == set()
    else:
        await eventually(lambda: world.scheduler.released == {"g0.0"}, timeout_s=60)
    assert (await client.post("chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("attempts", [1, 3])
async def test_max_generation_attempts(empty_world: GatewayWorld, attempts: int) -> None:
    world, model = empty_world, Aborting()
    world.scheduler.addresses.clear()
    for server_id in ("n0", "n1"):
        await serve_over_nats(world, server_id, model)
    await world.start_gateway(transport="nats", max_generation_attempts=attempts)
    answer = await world.http(await world.open()).post("chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert len(model.requests) == attempts + 1


@pytest.mark.parametrize("transport", ["nats", "zmq"])
async def test_transport(empty_world: GatewayWorld, transport: str) -> None:
    """Of the two transports of a server, the gateway uses the configured one."""
    world, over_nats = empty_world, ScriptedModel()
    (zmq,) = world.scheduler.addresses
    await serve_over_nats(world, "s0", over_nats)
    both = Address("s0", subjects.generate(world.run, "s0"), zmq.zmq_endpoint)
    world.scheduler.addresses[:] = [both]
    await world.start_gateway(transport=transport)
    answer = await world.http(await world.open()).post("chat/completions", json=CHAT)
    assert answer.status_code == 200
    asked = (len(over_nats.requests), len(world.model.requests))
    assert asked == ((1, 0) if transport == "nats" else (0, 1))


async def serve_over_nats(world: GatewayWorld, server_id: str, model: ScriptedModel) -> None:
    subject = subjects.generate(world.run, server_id)
    server = NatsGenerateServer(world.service.bus.connection.client, subject)
    await server.start(model)
    world.stack.push_async_callback(server.stop)
    world.scheduler.addresses.append(Address(server_id, subject, ""))


@pytest.mark.parametrize(
    ("parser", "content", "thoughts"),
    [("auto", "Yes.", "Hm."), ("none", "<think>Hm.</think>Yes.", None)],
)
async def test_reasoning_parser_of_the_run(
    empty_world: GatewayWorld, parser: str, content: str, thoughts: str | None
) -> None:
    world = empty_world
    world.run_settings["chat"] = {"reasoning_parser": parser}
    world.model.reply = lambda prompt, request: "<think>Hm.</think>Yes."
    await world.start_gateway()
    answer = await world.http(await world.open()).post("chat/completions", json=CHAT)
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thoughts)


@pytest.mark.parametrize("no_thoughts", [False, True])
async def test_template_args_of_the_run(empty_world: GatewayWorld, no_thoughts: bool) -> None:
    world = empty_world
    world.run_settings["chat"] = {"template_args": {"no_thoughts": no_thoughts}}
    await world.start_gateway()
    answer = await world.http(await world.open()).post("chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert world.model.prompt().endswith("<think></think>") == no_thoughts


async def test_session_defaults(empty_world: GatewayWorld) -> None:
    """A session opened over HTTP has these bounds where it names none."""
    world = empty_world
    defaults = {"max_episode_tokens": 700, "max_new_tokens": 9, "timeout_s": 55.0}
    await world.start_gateway(session_defaults=defaults)
    admin = world.http(await world.open("probe"), ADMIN_KEY)
    for body, bounds in (
        ({}, (700, 9, 55.0)),
        ({"max_episode_tokens": 800, "max_new_tokens": 10, "timeout_s": 66.0}, (800, 10, 66.0)),
    ):
        opened = SessionOpened(**(await admin.post("sessions", json=body)).json())
        shown = (await world.http(opened).get("sessions/current")).json()
        assert (shown["max_episode_tokens"], shown["max_new_tokens"]) == bounds[:2]
        assert shown["deadline_unix_s"] - time.time() == pytest.approx(bounds[2], abs=5.0)


async def test_a_session_over_http_is_no_longer_than_what_the_model_reads(
    empty_world: GatewayWorld,
) -> None:
    world = empty_world
    context = model_card().context_tokens
    await world.start_gateway(session_defaults={"max_episode_tokens": 4 * context})
    admin = world.http(await world.open("probe"), ADMIN_KEY)
    for body in ({}, {"max_episode_tokens": 2 * context}):
        opened = SessionOpened(**(await admin.post("sessions", json=body)).json())
        client = world.http(opened)
        assert (await client.get("sessions/current")).json()["max_episode_tokens"] == context
        long = {"messages": [{"role": "user", "content": "x" * context}]}
        refused = (await client.post("chat/completions", json=long)).json()["error"]
        assert refused["code"] == "context_length_exceeded"
