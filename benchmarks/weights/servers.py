"""Real servers, each a process with a receiver and a relay, and the routes of a real weight_sync.

The servers stand for hosts of their own: they listen on another address than the loopback's, so that
what they send to each other is encrypted, as it is between hosts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.bench_transport import start_nats
from tailrace.bus import Bus
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Service
from tailrace.weights import TensorBytes, WeightReceiver
from tailrace.weights.segment import SegmentFolder
from tailrace.weights.tensors import fill, layout
from tailrace_protos import subjects
from tailrace_protos.weights import RouteRequest, WeightManifest, WeightsAvailable, WeightSource
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.handlers import Routes

RUN, BIND_HOST = "bench", "127.0.0.2"
_TENSOR_BYTES = 16 << 20


def serve(url: str, number: int, pipe: Connection) -> None:
    """A server: fetches the version that it is told, says how much it passed on."""

    async def run() -> None:
        bus = await Bus.connect(_endpoints(url), name=f"s{number}", run=RUN)
        receiver = WeightReceiver(bus, RUN, f"host{number}", f"s{number}", bind_host=BIND_HOST)
        pipe.send("ready")
        await receiver.fetch(await asyncio.to_thread(pipe.recv))
        pipe.send("fetched")
        await asyncio.to_thread(pipe.recv)
        pipe.send(receiver.relay.num_sent_bytes)
        await receiver.close()
        await bus.close()

    asyncio.run(run())


def transfer(num_servers: int, num_bytes: int) -> tuple[float, int]:
    """Seconds until all servers have a version, and the bytes that they sent to each other."""
    with ExitStack() as stack:
        _, url = start_nats(stack)
        pipes = [stack.enter_context(_process(url, at)) for at in range(num_servers)]
        return asyncio.run(_transfer(url, pipes, num_bytes))


def _endpoints(url: str) -> Endpoints:
    return Endpoints(nats_url=url, redis_url="redis://unused", host_id="learner")


@contextmanager
def _process(url: str, number: int) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    start = multiprocessing.get_context("spawn").Process
    child = start(target=serve, args=(url, number, there), daemon=True)
    child.start()
    yield here
    child.kill()


async def _transfer(url: str, pipes: list[Connection], num_bytes: int) -> tuple[float, int]:
    vault = SegmentVault(RUN, "learner", bind_host=BIND_HOST, advertise_host="")
    await vault.start()
    manifest = await _published(vault, num_bytes)
    service = Service("weight_sync", RunConfig(exp_name=RUN), _endpoints(url), instance_id="w")
    routes = Routes(vault)
    service.endpoint(subjects.weight_route(RUN), RouteRequest, routes.route, concurrency=1024)
    serving = asyncio.create_task(service.serve())
    for pipe in pipes:
        await asyncio.to_thread(pipe.recv)
    began_s = time.perf_counter()
    for pipe in pipes:
        pipe.send(WeightsAvailable(manifest, vault.source(0), relays=True))
    for pipe in pipes:
        await asyncio.to_thread(pipe.recv)
    seconds = time.perf_counter() - began_s
    num_relayed = 0
    for pipe in pipes:
        pipe.send("how much")
        num_relayed += await asyncio.to_thread(pipe.recv)
    service.stop("measured")
    await serving
    await vault.stop(delete=True)
    return seconds, num_relayed


async def _published(vault: SegmentVault, num_bytes: int) -> WeightManifest:
    """Version 0, in the vault."""
    data = memoryview(np.random.default_rng(0).bytes(_TENSOR_BYTES))
    tensors = [
        TensorBytes(f"w{at}", "uint8", (_TENSOR_BYTES,), data)
        for at in range(num_bytes // _TENSOR_BYTES)
    ]
    offsets, size = layout(tensors)
    offered = SegmentFolder(RUN, "learner").create(size)
    manifest = WeightManifest(0, "a", 0, None, fill(offered.data, tensors, offsets), size)
    copy = await vault.copy(manifest, WeightSource("learner", offered.name, ""))
    copy.seal(manifest)
    offered.close(delete=True)
    return manifest
