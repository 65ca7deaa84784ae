"""Failures of an end (death, hang, restart, invalid messages), over both transports."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tailrace.channel import (
    ChannelError,
    ClientChannelConfig,
    CurveKeys,
    EndpointError,
    GenerateClient,
    GenerateRefusedError,
    NatsGenerateClient,
    NatsGenerateServer,
    ServerChannelConfig,
    ZmqGenerateClient,
    ZmqGenerateServer,
)
from tailrace_protos.base import decode, encode
from tailrace_protos.generation import (
    CallErrorCode,
    ChunkFrame,
    FinishReason,
    GenerateRequest,
    RequestFrame,
)
from tests.contract.channel.harness import (
    QUICK,
    QUICK_SERVER,
    CountingEngine,
    Ends,
    HeldEngine,
    chunk,
    peer_process,
    request,
)
from tests.world.samples import sample
from tests.world.servers import ServerProcess, make_nats_server

SOON_S = 60.0  # far below `chunk_timeout_s`, after which every call is given up
assert QUICK.silence_s < SOON_S < QUICK.chunk_timeout_s


async def until_it_answers(client: GenerateClient, ends: Ends) -> None:
    """Call a server until it answers, as a caller with retries would."""
    async with asyncio.timeout(60):
        for attempt in range(10_000):
            try:
                await client.generate(ends.address(), request(f"quick-{attempt}")).collect()
                return
            except ChannelError:
                await asyncio.sleep(0.02)


async def test_a_killed_server_fails_its_calls_soon_with_their_partial_tokens(ends: Ends) -> None:
    async with peer_process("server", ends) as process:
        client = await ends.client(QUICK)
        calls = [client.generate(ends.address(), request(f"c{n}")) for n in range(20)]
        for call in calls:
            await anext(call)
        process.kill()
        for call in calls:
            async with asyncio.timeout(SOON_S):
                with pytest.raises(ChannelError) as raised:
                    await call.collect()
            assert raised.value.server_id == "s1"
            assert raised.value.partial.token_ids.tolist() == [0, 1, 2]
            assert call.partial().num_tokens == 3


async def test_a_server_that_hangs_fails_its_calls_soon(ends: Ends) -> None:
    async with peer_process("server", ends) as process:
        client = await ends.client(QUICK)
        call = client.generate(ends.address(), request("c1"))
        await anext(call)
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(ChannelError, match="silent: no frame"):
                await call.collect()


async def test_a_server_that_was_never_there_fails_calls_soon(ends: Ends) -> None:
    client = await ends.client(QUICK)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ChannelError):
            await client.generate(ends.address(), request("c1")).collect()


async def test_a_restarted_server_serves_new_calls(ends: Ends) -> None:
    client = await ends.client(QUICK)
    async with peer_process("server", ends) as process:
        call = client.generate(ends.address(), request("c1"))
        await anext(call)
        process.kill()
        await process.wait()
    async with peer_process("server", ends):
        await until_it_answers(client, ends)
    with pytest.raises(ChannelError):
        await call.collect()


async def test_a_stopped_server_tells_its_callers_at_once(ends: Ends) -> None:
    engine = HeldEngine()
    server = await ends.serve(engine)
    client = await ends.client(ClientChannelConfig(keepalive_s=20, silence_s=60))
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 3))
    await anext(call)
    await server.stop()
    async with asyncio.timeout(60):
        with pytest.raises(ChannelError):
            await call.collect()
    assert engine.aborted == ["c1"]
    assert call.partial().num_tokens == 3


async def test_the_last_words_of_a_server_that_left_are_heard(ends: Ends) -> None:
    client = await ends.client()
    async with peer_process("server", ends) as process:
        calls = [client.generate(ends.address(), request(f"c{n}")) for n in range(50)]
        for call in calls:
            await anext(call)
        end_of_process = os.pidfd_open(process.pid)
        process.send_signal(signal.SIGUSR1)
        # Nothing is read here until the server is gone, as when a busy loop comes to it late.
        assert select.select([end_of_process], [], [], 60)[0]
        os.close(end_of_process)
        async with asyncio.timeout(60):
            ended = [await call.collect() for call in calls]
    assert {generation.finish_reason for generation in ended} == {FinishReason.STOP}
    assert {generation.num_tokens for generation in ended} == {4}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_calls_of_a_client_that_is_gone_are_aborted(ends: Ends, how: signal.Signals) -> None:
    engine = HeldEngine()
    await ends.serve(engine, QUICK_SERVER)
    async with peer_process("client", ends) as process:
        await engine.got("orphan")
        process.send_signal(how)
        await engine.until(lambda: engine.aborted == ["orphan"])
    client = await ends.client()
    call = client.generate(ends.address(), request("orphan"))  # the id is free again
    await engine.until(lambda: len(engine.requests) == 2)
    engine.sinks["orphan"].send(chunk("orphan", 0, 1, FinishReason.STOP))
    assert (await call.collect()).num_tokens == 1


class Raw:
    """Sends any bytes to a server and reads what comes back."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    async def open(self) -> Raw:
        address = self._ends.address()
        if self._ends.transport == "nats":
            self._nats = await self._ends.connection()
            self._inbox = self._nats.new_inbox()
            self._subscription = await self._nats.subscribe(self._inbox)
        else:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.connect(address.zmq_endpoint)
            self._ends.on_close(self._close)
        return self

    async def _close(self) -> None:
        self._context.destroy(0)

    async def send(self, data: bytes) -> None:
        if self._ends.transport == "nats":
            await self._nats.publish(self._ends.address().nats_subject, data, reply=self._inbox)
        else:
            self._socket.send(data)

    async def reply(self) -> ChunkFrame:
        if self._ends.transport == "nats":
            return decode((await self._subscription.next_msg(60)).data, ChunkFrame)
        async with asyncio.timeout(60):
            while not self._socket.poll(0):
                await asyncio.sleep(0.005)
        return decode(self._socket.recv(), ChunkFrame)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"not msgpack", encode({"a": 1}), encode(["request_frame", "zero", 0, []])],
    ids=["empty", "reserved", "text", "map", "wrong types"],
)
async def test_malformed_frames_are_answered_and_counted_and_hurt_nobody(
    ends: Ends, data: bytes
) -> None:
    await ends.serve(CountingEngine())
    raw = await Raw(ends).open()
    before = sample("tailrace_channel_malformed_total", side="server")
    await raw.send(data)
    assert (await raw.reply()).broken.startswith("malformed: ")
    assert sample("tailrace_channel_malformed_total", side="server") == before + 1
    client = await ends.client()
    assert (await client.generate(ends.address(), request("c1")).collect()).num_tokens == 8


async def test_a_malformed_request_between_good_ones_fails_alone(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    raw = await Raw(ends).open()
    good = msgspec.to_builtins(request("good"), builtin_types=(memoryview,))
    bad = {**good, "call_id": "bad", "max_new_tokens": "many"}
    await raw.send(encode(["request_frame", 0, 0, [bad, good]]))
    chunks = {message.call_id: message for message in (await raw.reply()).messages}
    assert chunks["bad"].error is not None
    assert chunks["bad"].error.code is CallErrorCode.INVALID
    assert "max_new_tokens" in chunks["bad"].error.reason
    assert len(chunks["good"].token_ids) == 32


async def test_a_prompt_that_is_no_array_of_ids_is_invalid(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    client = await ends.client()
    odd = GenerateRequest("c1", "e", memoryview(b"12345"), 4)
    with pytest.raises(GenerateRefusedError, match="5 bytes") as raised:
        await client.generate(ends.address(), odd).collect()
    assert raised.value.code is CallErrorCode.INVALID


async def test_a_lost_request_frame_breaks_the_link_instead_of_hanging_a_call(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    raw = await Raw(ends).open()
    await raw.send(encode(RequestFrame(0, 0, (request("c1"),))))
    await engine.got("c1")
    await raw.send(encode(RequestFrame(2, 0, (request("c3"),))))
    assert (await raw.reply()).broken == "gap: frame 2 came instead of 1: calls were lost"
    await engine.until(lambda: engine.aborted == ["c1"])
    assert "c3" not in engine.sinks


async def test_frames_of_a_link_from_before_a_restart_are_refused(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    raw = await Raw(ends).open()
    await raw.send(encode(RequestFrame(17, 0, (request("c1"),))))
    assert (await raw.reply()).broken.startswith("gap: ")
    assert engine.sinks == {}


async def test_an_empty_frame_is_answered(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    raw = await Raw(ends).open()
    await raw.send(encode(RequestFrame(0)))
    assert await raw.reply() == ChunkFrame(0, 1)


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[ServerProcess]:
    server = make_nats_server(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_nats_says_at_once_when_nobody_listens(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    ends = Ends("nats", nats_server.url, run_name, tmp_path)
    client = await ends.client(ClientChannelConfig(keepalive_s=50, silence_s=100))
    async with asyncio.timeout(60):
        with pytest.raises(ChannelError, match="no_responder"):
            await client.generate(ends.address(), request("c1")).collect()
    await ends.close()


async def test_a_restarted_nats_server_delays_calls_but_loses_none_unnoticed(
    own_nats: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    ends = Ends("nats", own_nats.url, run_name, tmp_path)
    engine = HeldEngine()
    await ends.serve(engine, ServerChannelConfig(keepalive_s=0.1, silence_s=60))
    client = await ends.client(ClientChannelConfig(keepalive_s=0.1, silence_s=60))
    calls = [client.generate(ends.address(), request(f"c{n}")) for n in range(5)]
    await engine.got(*(f"c{n}" for n in range(5)))
    own_nats.kill()
    for number in range(5):
        engine.sinks[f"c{number}"].send(chunk(f"c{number}", 0, 3, FinishReason.STOP))
    own_nats.start()
    for call in calls:
        async with asyncio.timeout(60):
            try:
                tokens = (await call.collect()).token_ids.tolist()
            except ChannelError:
                tokens = call.partial().token_ids.tolist()
        assert tokens in ([], [0, 1, 2])
    answers = asyncio.create_task(until_it_answers(client, ends))
    while not answers.done():
        for call_id, sink in engine.sinks.items():
            sink.send(chunk(call_id, 0, 1, FinishReason.STOP))
        await asyncio.sleep(0.02)
    await answers
    await ends.close()


async def test_a_nats_connection_closed_under_a_client_fails_its_calls(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    ends = Ends("nats", nats_server.url, run_name, tmp_path)
    engine = HeldEngine()
    await ends.serve(engine)
    connection = await ends.connection()
    client = NatsGenerateClient(connection, QUICK)
    await client.start()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    await connection.close()
    with pytest.raises(ChannelError, match="connection is closed"):
        await call.collect()
    await client.close()
    await ends.close()


async def test_a_nats_frame_without_reply_subject_is_counted(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    ends = Ends("nats", nats_server.url, run_name, tmp_path)
    connection = await ends.connection()
    server = NatsGenerateServer(connection, f"{run_name}.s1", QUICK_SERVER)
    await server.start(CountingEngine())
    before = sample("tailrace_channel_malformed_total", side="server")
    await connection.publish(f"{run_name}.s1", b"hello")
    client = await ends.client()
    await client.generate(ends.address(), request("c1")).collect()
    assert sample("tailrace_channel_malformed_total", side="server") == before + 1
    await server.stop()
    await ends.close()


async def test_curve_keys_encrypt_and_keep_out_who_has_not_the_servers_key() -> None:
    keys, wrong = CurveKeys.generate(), CurveKeys.generate()
    server = ZmqGenerateServer("tcp://127.0.0.1:*", QUICK_SERVER, keys=keys)
    await server.start(CountingEngine())
    client = ZmqGenerateClient(QUICK, keys=CurveKeys.generate())
    await client.start()
    address = Ends("zmq", "", "run", Path()).address()
    address = address._replace(zmq_endpoint=server.endpoint, zmq_public_key=keys.public)
    try:
        assert (await client.generate(address, request("c1")).collect()).num_tokens == 8
        for stranger in (
            address._replace(zmq_public_key=wrong.public),
            address._replace(zmq_public_key=""),
        ):
            with pytest.raises(ChannelError) as raised:
                await client.generate(stranger, request("c1")).collect()
            assert raised.value.partial.num_tokens == 0
        assert (await client.generate(address, request("c2")).collect()).num_tokens == 8
    finally:
        await client.close()
        await server.stop()


@pytest.mark.parametrize(
    "endpoint", ["ipc:///no/such/directory/s.sock", "ipc:///tmp/" + "x" * 120, "nonsense"]
)
async def test_an_endpoint_that_cannot_be_bound_is_a_clear_error(endpoint: str) -> None:
    server = ZmqGenerateServer(endpoint, QUICK_SERVER)
    with pytest.raises(EndpointError, match="tcp://<interface>") as raised:
        await server.start(CountingEngine())
    assert raised.value.endpoint == endpoint


async def test_a_busy_tcp_port_is_a_clear_error() -> None:
    first = ZmqGenerateServer("tcp://127.0.0.1:*", QUICK_SERVER)
    await first.start(CountingEngine())
    with pytest.raises(EndpointError, match="in use"):
        await ZmqGenerateServer(first.endpoint, QUICK_SERVER).start(CountingEngine())
    await first.stop()
