"""Closed-loop callers in a process of their own.

`python -m benchmarks.transport.callers nats|zmq|ray <run> <endpoint> <pid>...` reads JSON objects, one
a line: `{"callers": 64, "seconds": 2}` keeps that many calls in flight for that long and prints what
was measured. The processor time is that of this process and of the given (and all their child)
processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.transport.payload import NUM_GENERATED, PROMPT
from benchmarks.transport.server import SERVER_ID
from tailrace.bus.bus import Bus
from tailrace.channel import Address, GenerateClient, NatsGenerateClient, ZmqGenerateClient
from tailrace.config import Endpoints
from tailrace.tracing import current_traceparent, span
from tailrace_protos import subjects
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import GenerateRequest

Call = Callable[[], Awaitable[None]]

WARM_UP_S = 0.4


async def channel_call(transport: str, run: str, endpoint: str) -> Call:
    """One call through the channel, as the agents service makes it."""
    client: GenerateClient
    if transport == "zmq":
        client = ZmqGenerateClient()
    else:
        bus = await Bus.connect(Endpoints.from_env(), name="bench-callers")
        client = NatsGenerateClient(bus.connection.client)
    await client.start()
    address = Address(SERVER_ID, subjects.generate(run, SERVER_ID), endpoint)
    numbers = itertools.count()

    async def call() -> None:
        with span("turn"):
            call_id = f"episode-{next(numbers)}"
            request = GenerateRequest(
                call_id, "episode", pack_int32(PROMPT), NUM_GENERATED, traceparent=current_traceparent()
            )
            generation = await client.generate(address, request).collect()
        assert generation.num_tokens == NUM_GENERATED

    return call


async def ray_call() -> Call:
    """One call of an async Ray actor with the same arrays; imports Ray only where it is measured."""
    from benchmarks.transport.ray_actor import start_actor

    generate = start_actor()

    async def call() -> None:
        token_ids, _ = await generate(PROMPT)
        assert len(token_ids) == NUM_GENERATED

    return call


async def load(call: Call, num_callers: int, seconds: float) -> list[float]:
    """Latencies in seconds of calls that ended within the window."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def caller() -> None:
        started = time.perf_counter()
        while started < end:
            await call()
            ended = time.perf_counter()
            latencies.append(ended - started)
            started = ended

    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return latencies


def cpu_seconds(pids: list[int]) -> float:
    """Processor time so far of these processes, of this one, and of all their children."""
    roots = [psutil.Process(pid) for pid in pids] + [psutil.Process()]
    processes = {p.pid: p for root in roots for p in (root, *root.children(recursive=True))}
    total = 0.0
    for process in processes.values():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def measure(call: Call, num_callers: int, seconds: float, pids: list[int]) -> dict[str, Any]:
    """One round."""
    await load(call, num_callers, WARM_UP_S)
    cpu, started = cpu_seconds(pids), time.perf_counter()
    latencies = await load(call, num_callers, seconds)
    elapsed, cpu = time.perf_counter() - started, cpu_seconds(pids) - cpu
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "calls_per_s": len(latencies) / elapsed,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "cpu_us_per_call": cpu / len(latencies) * 1e6,
        "num_calls": len(latencies),
    }


async def run(transport: str, run_name: str, endpoint: str, pids: list[int]) -> None:
    """Obey standard input until it ends."""
    call = await (ray_call() if transport == "ray" else channel_call(transport, run_name, endpoint))
    gc.collect()
    gc.freeze()  # on all sides: a full collection of what imports left takes 30 ms
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await measure(call, order["callers"], order["seconds"], pids)), flush=True)


def main() -> int:
    """Parse the arguments and obey."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transport", choices=["nats", "zmq", "ray"])
    parser.add_argument("run")
    parser.add_argument("endpoint")
    parser.add_argument("pids", type=int, nargs="*")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(args.transport, args.run, args.endpoint, args.pids))
    return 0


if __name__ == "__main__":
    sys.exit(main())
