"""Weights over real ZMQ sockets: loss, silence, strangers, encryption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from tailrace.weights import WeightsGoneError, WeightsUnreachableError
from tailrace.weights.chunks import ChunkFetch, ChunkServer
from tailrace_protos.base import decode, encode
from tailrace_protos.weights import ChunkReply, ChunkRequest, WeightManifest, WeightSource

DATA = bytes(range(251)) * 20_000  # 5 MB and no multiple of a chunk
MANIFEST = WeightManifest(3, "a", 1, None, (), len(DATA))


def held(policy_version: int, is_delta: bool) -> memoryview | None:
    return memoryview(DATA) if policy_version == 3 and not is_delta else None


@asynccontextmanager
async def serving(
    bind_host: str = "127.0.0.1", advertise_host: str = ""
) -> AsyncIterator[WeightSource]:
    server = ChunkServer(held, bind_host=bind_host, advertise_host=advertise_host)
    await server.start()
    yield WeightSource("far", "", server.endpoint, server.public_key)
    await server.stop()


async def fetch(source: WeightSource, manifest: WeightManifest = MANIFEST, **how: float) -> bytes:
    into = bytearray(manifest.num_bytes)
    await ChunkFetch(source, manifest.policy_version, memoryview(into), **how).run()  # type: ignore[arg-type]
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


async def test_beyond_loopback_the_bytes_are_encrypted_and_strangers_get_nothing() -> None:
    async with serving("0.0.0.0", "127.0.0.1") as source:
        assert source.zmq_public_key
        assert await fetch(source) == DATA
        stranger = WeightSource("far", "", source.zmq_endpoint)
        with pytest.raises(WeightsUnreachableError, match="bind_host"):
            await fetch(stranger, silence_s=0.05, max_silences=1)


async def test_a_source_that_never_answers_is_given_up() -> None:
    context = zmq.asyncio.Context()
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(WeightsUnreachableError):
        await fetch(WeightSource("far", "", f"tcp://127.0.0.1:{port}"), silence_s=0.02, max_silences=2)
    context.destroy(linger=0)


async def test_a_source_without_zmq_is_unreachable_at_once() -> None:
    with pytest.raises(WeightsUnreachableError, match="without ZMQ"):
        await fetch(WeightSource("far", "name", ""))


async def test_lost_doubled_and_shortened_chunks_are_asked_for_again() -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
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
            reply = encode(ChunkReply(3, request.offset, memoryview(data)))
            for _ in range(2):
                await router.send_multipart([peer, reply])

    serving_badly = asyncio.create_task(serve_badly())
    source = WeightSource("far", "", f"tcp://127.0.0.1:{port}")
    assert await fetch(source, chunk_bytes=300_000, credit=4, silence_s=0.05) == DATA
    assert len(asked) > len(set(asked))
    assert set(asked) == set(range(0, len(DATA), 300_000))
    serving_badly.cancel()
    context.destroy(linger=0)


async def test_nonsense_on_the_socket_does_not_stop_the_server() -> None:
    async with serving() as source:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(source.zmq_endpoint)
        await dealer.send(b"\xff nonsense")
        assert "malformed" in decode(await dealer.recv(), ChunkReply).error
        for request in (ChunkRequest(3, -1, 5), ChunkRequest(3, 0, 0), ChunkRequest(3, 0, 1 << 40)):
            await dealer.send(encode(request))
            assert decode(await dealer.recv(), ChunkReply).error
        await dealer.send_multipart([b"too", b"many", b"frames"])
        assert await fetch(source) == DATA
        context.destroy(linger=0)
