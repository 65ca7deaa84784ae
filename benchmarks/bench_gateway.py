"""What the gateway costs: latency that it adds, sessions that it carries, clients that wait for it.

    make bench-gateway

The engine answers at once (64 tokens and an end of turn), so that what is measured is the way to it and
back. `direct` calls the engine over the generation channel with the prompt's ids; `gateway` sends the
same conversation as HTTP to a gateway process, with real NATS and Redis.
Both alternate in rounds, and the difference of their medians is what the gateway adds.

`sessions` holds 2,000 of them open at once, each with a call that waits two seconds at the engine.
`pool` compares the HTTP client that agents are given with httpx's own pool, as more calls wait.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import uvloop

from benchmarks.gateway.model import REPLY, renderer
from benchmarks.gateway.world import World, world_of
from benchmarks.results import Results, median
from tailrace.channel import ZmqGenerateClient
from tailrace.sdk.http import make_http_client
from tailrace_protos.base import pack_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.session import SessionOpened

PACKAGES = ("tailrace", "starlette", "uvicorn", "httptools", "aiohttp", "httpx2", "redis", "nats-py")
WORDS = "Tell me about foxes and what they do all day long. " * 4
NUM_TURNS = 4


def conversation(num_turns: int, words: str = WORDS) -> list[dict[str, str]]:
    """The messages that an agent sends in its so-many-th turn."""
    messages = [{"role": "user", "content": words}]
    for _ in range(num_turns):
        messages += [
            {"role": "assistant", "content": REPLY},
            {"role": "user", "content": words},
        ]
    return messages


class DirectCalls:
    """Calls the engine over the channel."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._client = ZmqGenerateClient()
        self._ids = itertools.count()
        self._prompts = [
            pack_int32(
                renderer().opening_ids(
                    [ChatMessage(one["role"], one["content"]) for one in conversation(turn)]
                )
            )
            for turn in range(NUM_TURNS)
        ]

    async def __aenter__(self) -> DirectCalls:
        await self._client.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def call(self, turn: int) -> None:
        """One call."""
        name = f"direct.{next(self._ids)}"
        request = GenerateRequest(name, name, self._prompts[turn], 256)
        await self._client.generate(self._world.engine, request).collect()


async def play(calls: Callable[[int], Awaitable[None]], took_s: list[float], num: int) -> None:
    """`num` calls, one after the other, turn by turn."""
    for index in range(num):
        started_s = time.perf_counter()
        await calls(index % NUM_TURNS)
        took_s.append(time.perf_counter() - started_s)


async def measure_latency(world: World, results: Results, in_flight: int, args: Any) -> None:
    """Alternating rounds, direct and through the gateway."""
    took: dict[str, list[float]] = {"direct": [], "gateway": []}
    rounds: dict[str, list[float]] = {"direct": [], "gateway": []}
    num = args.calls // in_flight
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    async with DirectCalls(world) as direct, aiohttp.ClientSession(connector=connector) as http:
        for number in range(args.rounds + 1):
            for path in ("direct", "gateway"):
                one_round: list[float] = []
                ways = [
                    direct.call if path == "direct" else await through_gateway(world, http, num)
                    for _ in range(in_flight)
                ]
                players = [play(way, one_round, num) for way in ways]
                await asyncio.gather(*players)
                if number:  # the first one warms up
                    took[path] += one_round
                    rounds[path].append(median(one_round))
    for path, values in took.items():
        ordered = sorted(values)
        results.add(
            part="latency",
            path=path,
            in_flight=in_flight,
            calls=len(ordered),
            p50_ms=1e3 * median(rounds[path]),
            p99_ms=1e3 * ordered[int(len(ordered) * 0.99)],
        )
    added_ms = 1e3 * (median(rounds["gateway"]) - median(rounds["direct"]))
    results.at_most(f"added p50 in ms at {in_flight} in flight", added_ms, 2.0)


async def through_gateway(
    world: World, http: aiohttp.ClientSession, num: int
) -> Callable[[int], Awaitable[None]]:
    """`num` calls, every conversation in a session of its own, opened beforehand."""
    bodies = [{"model": "m", "messages": conversation(turn)} for turn in range(NUM_TURNS)]
    sessions = iter(await world.open_many(-(-num // NUM_TURNS)))
    current: list[SessionOpened] = []

    async def call(turn: int) -> None:
        if turn == 0:
            current[:] = [next(sessions)]
        opened = current[0]
        headers = {"authorization": f"Bearer {opened.api_key}"}
        url = f"{opened.base_url}/chat/completions"
        async with http.post(url, json=bodies[turn], headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    return call


async def measure_sessions(world: World, results: Results, num: int) -> None:
    """Many sessions at once, each waiting for the model in every turn."""
    wait_s, num_turns = 2.0, 2
    sessions = await world.open_many(num)
    took_s: list[float] = []
    words = f"Think. @{wait_s}@"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    before = world.gateway.cpu_times()
    started_s = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=_FOR_EVER) as http:

        async def agent(opened: SessionOpened) -> None:
            headers = {"authorization": f"Bearer {opened.api_key}"}
            url = f"{opened.base_url}/chat/completions"
            for turn in range(num_turns):
                body = {"model": "m", "messages": conversation(turn, words)}
                begun_s = time.perf_counter()
                async with http.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                took_s.append(time.perf_counter() - begun_s)

        await asyncio.gather(*map(agent, sessions))
    wall_s = time.perf_counter() - started_s
    after = world.gateway.cpu_times()
    num_calls = len(took_s)
    cpu_s = after.user + after.system - before.user - before.system
    took_s.sort()
    results.add(
        part="sessions",
        in_flight=num,
        calls=num_calls,
        wall_s=wall_s,
        p50_ms=1e3 * median(took_s),
        p99_ms=1e3 * took_s[int(num_calls * 0.99)],
        cpu_ms_per_call=1e3 * cpu_s / num_calls,
        rss_mib=world.gateway.memory_info().rss / 2**20,
    )
    results.at_least("sessions served at once", num_calls / num_turns, num)


async def measure_pool(world: World, results: Results, num: int, client: str, words: str) -> float:
    """CPU of this process for each of `num` calls that wait at once; in seconds."""
    opened = await world.open()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(None)
    made: Any = (
        make_http_client("httpx2")
        if client == "tailrace"
        else httpx2.AsyncClient(limits=limits, timeout=timeout)
    )
    headers = {"authorization": f"Bearer {opened.api_key}"}
    url = f"{opened.base_url}/completions"
    async with made as http:

        async def one() -> None:
            answer = await http.post(url, json={"prompt": words}, headers=headers)
            assert answer.status_code == 200, answer.text

        started_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(num)))
        cpu_s = time.process_time() - cpu_s
        wall_s = time.perf_counter() - started_s
    per_call_ms = 1e3 * cpu_s / num
    results.add(
        part="pool", path=client, in_flight=num, calls=num, wall_s=wall_s, cpu_ms_per_call=per_call_ms
    )
    return cpu_s / num


_FOR_EVER = aiohttp.ClientTimeout(total=None)


async def run(args: argparse.Namespace, folder: Path) -> Results:
    """All parts."""
    results = Results("gateway", PACKAGES, calls=args.calls, rounds=args.rounds, turns=NUM_TURNS)
    async with world_of(folder) as world:
        for in_flight in (1, 16):
            await measure_latency(world, results, in_flight, args)
        await measure_sessions(world, results, args.sessions)
        costs: dict[tuple[str, int], float] = {}
        for num in args.pool:
            for client in ("tailrace", "httpx2"):
                cost = await measure_pool(world, results, num, client, "Think. @1.0@")
                costs[client, num] = cost
        first, last = args.pool[0], args.pool[-1]
        grown = costs["tailrace", last] / costs["tailrace", first]
        results.at_most(f"client CPU a call, {last} waiting over {first}", grown, 2.0)
    return results


def main() -> int:
    """Measure, print, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--pool", type=int, nargs="+", default=[250, 1000, 2000])
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(run(args, Path(folder)))
    results.show()
    print(results.write())
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
