"""Weights over real ZMQ sockets: loss, silence, strangers, encryption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from tailrace.weights import WeightsGoneError, WeightsUnreachableError
from tailrace.weights.chunks import ChunkFetch, ChunkServer, Holding
from tailrace_protos.base import decode, encode
from tailrace_protos.weights import ChunkReply, ChunkRequest, WeightManifest, WeightSource

DATA = bytes(range(251)) * 20_000  # 5 MB and no multiple of a chunk
MANIFEST = WeightManifest(3, "a", 1, None, (), len(DATA))


def held(policy_version: int, is_delta: bool) -> Holding | None:
    is_there = policy_version == 3 and not is_delta
    return Holding(memoryview(DATA), complete=True) if is_there else None


@asynccontextmanager
async def serving(
    bind_host: str = "127.0.0.1", advertise_host: str = ""
) -> AsyncIterator[WeightSource]:
    server = ChunkServer(held, bind_host=bind_host, advertise_host=advertise_host)
    await server.start()
    yield WeightSource("far", "", server.endpoint, server.public_key)
    await server.stop()


async def fetch(
    source: WeightSource,
    manifest: WeightManifest = MANIFEST,
    chunk_bytes: int = 1 << 20,
    **how: float,
) -> bytes:
    into = memoryview(bytearray(manifest.num_bytes))
    holding = Holding(into, complete=False, chunk_bytes=chunk_bytes)
    await ChunkFetch(source, manifest.policy_version, holding, **how).run()  # type: ignore[arg-type]
    return bytes(into)


@pytest.mark.parametrize(("chunk_bytes", "credit"), [(1 << 20, 8), (10_007, 1), (8 << 20, 3)])
async def test_a_buffer_arrives_whole(chunk_bytes: int, credit: int) -> None:
    async with serving() as source:
        assert await fetch(source, chunk_bytes=chunk_bytes, credit=credit) == DATA


async def test_several_receivers_fetch_at_once() -> None:
    async with serving() as source:
        assert set(await asyncio.gather(*(fetch(source) for _ in range(5)))) == {DATA}


async def test_a_version_that_is_not_held_is_gone() -> None:
    async with serving() as source:
        with pytest.raises(WeightsGoneError, match=r"version 4 .*no longer held"):
            await fetch(source, WeightManifest(4, "a", 2, None, (), 100))


async def test_a_manifest_larger_than_the_buffer_is_refused() -> None:
    async with serving() as source:
        with pytest.raises(WeightsGoneError, match="outside"):
            await fetch(source, WeightManifest(3, "a", 1, None, (), len(DATA) + 1))


def keyed(context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, str]:
    """A sender's socket, and its public key."""
    public, secret = zmq.curve_keypair()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.CURVE_SERVER, 1)
    router.set(zmq.CURVE_SECRETKEY, secret)
    return router, public.decode()


@pytest.mark.parametrize("bind_host", ["0.0.0.0", "127.0.0.1"])
async def test_the_bytes_are_encrypted_and_strangers_get_nothing(bind_host: str) -> None:
    async with serving(bind_host, "127.0.0.1") as source:
        assert source.zmq_public_key
        assert await fetch(source) == DATA
        other, _ = zmq.curve_keypair()
        stranger = WeightSource("far", "", source.zmq_endpoint, other.decode())
        with pytest.raises(WeightsUnreachableError):
            await fetch(WeightSource("far", "", source.zmq_endpoint))
        with pytest.raises(WeightsUnreachableError, match="bind_host"):
            await fetch(stranger, silence_s=0.05, patience_s=0.1)


async def test_a_source_that_never_answers_is_given_up() -> None:
    context = zmq.asyncio.Context()
    mute, key = keyed(context)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(WeightsUnreachableError):
        await fetch(
            WeightSource("far", "", f"tcp://127.0.0.1:{port}", key), silence_s=0.02, patience_s=0.1
        )
    context.destroy(linger=0)


async def test_a_source_without_zmq_is_unreachable_at_once() -> None:
    with pytest.raises(WeightsUnreachableError, match="without ZMQ"):
        await fetch(WeightSource("far", "name", ""))


async def test_lost_doubled_and_shortened_chunks_are_asked_for_again() -> None:
    context = zmq.asyncio.Context()
    router, key = keyed(context)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    asked: list[int] = []
    max_open = 0

    async def serve_badly() -> None:
        nonlocal max_open
        answered = 0
        while True:
            peer, payload = await router.recv_multipart()
            request = decode(payload, ChunkRequest)
            asked.append(request.offset)
            max_open = max(max_open, len(asked) - answered)
            if len(asked) % 3 == 0:
                continue  # lost
            answered += 1
            data = DATA[request.offset : request.offset + request.num_bytes]
            if len(asked) % 5 == 0:
                data = data[:-1]
            reply = encode(ChunkReply(3, request.offset))
            for _ in range(2):
                await router.send_multipart([peer, reply, data])

    serving_badly = asyncio.create_task(serve_badly())
    source = WeightSource("far", "", f"tcp://127.0.0.1:{port}", key)
    assert await fetch(source, chunk_bytes=300_000, credit=4, silence_s=0.5) == DATA
    assert len(asked) > len(set(asked))
    assert set(asked) == set(range(0, len(DATA), 300_000))
    serving_badly.cancel()
    context.destroy(linger=0)


async def test_a_source_that_takes_longer_than_a_silence_for_each_chunk_is_not_given_up() -> None:
    """As behind a slow link: a connection that is cut after each silence would never see a chunk."""
    context = zmq.asyncio.Context()
    router, key = keyed(context)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def answer_late(peer: bytes, request: ChunkRequest) -> None:
        await asyncio.sleep(0.5)
        data = DATA[request.offset : request.offset + request.num_bytes]
        await router.send_multipart([peer, encode(ChunkReply(3, request.offset)), data])

    async def serve_late() -> None:
        async with asyncio.TaskGroup() as answers:
            while True:
                peer, payload = await router.recv_multipart()
                answers.create_task(answer_late(peer, decode(payload, ChunkRequest)))

    serving_late = asyncio.create_task(serve_late())
    source = WeightSource("far", "", f"tcp://127.0.0.1:{port}", key)
    assert await fetch(source, silence_s=0.02, patience_s=60.0) == DATA
    serving_late.cancel()
    context.destroy(linger=0)


async def test_nonsense_on_the_socket_does_not_stop_the_server() -> None:
    async with serving() as source:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        dealer.set(zmq.CURVE_SERVERKEY, source.zmq_public_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(source.zmq_endpoint)
        await dealer.send(b"\xff nonsense")
        assert "malformed" in decode(await dealer.recv(), ChunkReply).error
        for request in (ChunkRequest(3, -1, 5), ChunkRequest(3, 0, 0), ChunkRequest(3, 0, 1 << 40)):
            await dealer.send(encode(request))
            assert decode(await dealer.recv(), ChunkReply).error
        await dealer.send_multipart([b"too", b"many", b"frames"])
        assert await fetch(source) == DATA
        context.destroy(linger=0)


async def test_a_buffer_that_still_arrives_is_passed_on_chunk_by_chunk() -> None:
    """The receiver waits for what its holder lacks, and gets every chunk once that has it."""
    arriving = Holding(memoryview(bytearray(len(DATA))), complete=False, chunk_bytes=500_000)
    server = ChunkServer(lambda version, is_delta: arriving, alive_s=0.01)
    await server.start()
    into = Holding(memoryview(bytearray(len(DATA))), complete=False, chunk_bytes=500_000)
    source = WeightSource("far", "", server.endpoint, server.public_key)
    fetch = ChunkFetch(source, 3, into, credit=3, silence_s=30.0, patience_s=0.0)
    fetching = asyncio.create_task(fetch.run())
    for offset in arriving.missing():
        arriving.write(offset, memoryview(DATA)[offset : offset + 500_000])
        async with asyncio.timeout(60):
            while not into.has(offset, offset + arriving.size_at(offset)):
                await into.arrival(1.0)
        assert into.missing() == arriving.missing()
    await fetching
    assert into.data == DATA
    await server.stop()


async def test_a_holder_that_drops_the_buffer_says_so_to_those_that_wait() -> None:
    held_now = [Holding(memoryview(bytearray(len(DATA))), complete=False)]
    server = ChunkServer(lambda *_: held_now[0] if held_now else None, alive_s=0.01)
    await server.start()
    into = Holding(memoryview(bytearray(len(DATA))), complete=False)
    source = WeightSource("far", "", server.endpoint, server.public_key)
    fetching = asyncio.create_task(ChunkFetch(source, 3, into).run())
    await held_now[0].arrival(0.05)
    held_now.clear()
    with pytest.raises(WeightsGoneError, match="no longer held"):
        await fetching
    await server.stop()


async def test_two_parts_come_from_two_holders_and_nothing_comes_twice() -> None:
    into = Holding(memoryview(bytearray(len(DATA))), complete=False, chunk_bytes=300_000)
    async with serving() as one, serving() as other:
        first = ChunkFetch(one, 3, into, stripe=0, num_stripes=2)
        await first.run()
        assert into.missing(0, 2) == []
        assert into.missing() == into.missing(1, 2) != []
        await ChunkFetch(other, 3, into, stripe=1, num_stripes=2).run()
    assert into.data == DATA
