"""Cost of the gateway: added latency, concurrent sessions, waiting clients.

    make bench-gateway

`direct` calls the engine over the generation channel with prompts that were rendered beforehand;
`gateway` sends the same conversation as HTTP to a gateway process, with real NATS and Redis, in
requests that were written beforehand, by a client that only sends them and reads the answers; `hello`
is starlette on uvicorn that answers without doing anything. They take turns in rounds. A call's latency
is the time beyond what the engine itself takes; the gateway adds the difference of the medians.

At 1 in flight the engine answers at once. At 16 in flight each reply of 65 tokens takes 25 to 75 ms, at
random, which is faster than engines are: callers who come back the moment they are answered measure how
many calls a second go through, not how long one takes. That is the row with `engine_ms` 0; it has no
target, since the benchmark's own client takes its share of the two cores.

`sessions` holds 2,000 of them open at once, each with a call that waits two seconds at the engine.
`pool` compares the HTTP client that agents are given with the pools of httpx and httpx2, as more calls
wait. What would take those longer than `--patience` seconds of processor time is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import httpx2
import uvloop

from benchmarks.gateway.callers import Caller, Callers, Cpu, HttpCaller
from benchmarks.gateway.talks import NUM_TURNS, Talk
from benchmarks.gateway.world import World, world_of
from benchmarks.results import Results, median
from tailrace.sdk.http import make_http_client

PACKAGES = (
    "tailrace",
    "starlette",
    "uvicorn",
    "httptools",
    "uvloop",
    "aiohttp",
    "httpx",
    "httpx2",
    "redis",
    "nats-py",
)
PATHS = ("direct", "hello", "gateway")
_SESSION_WAIT_S = 2.0


async def play(caller: Caller, talks: list[Talk], took_s: list[float]) -> None:
    """Conversation after conversation; the times beyond what the engine took."""
    for talk in talks:
        await caller.begin(talk)
        for turn in range(NUM_TURNS):
            started_s = time.perf_counter()
            await caller.call(turn)
            took_s.append(time.perf_counter() - started_s - talk.waits_s[turn])
    await caller.end()


async def measure_latency(
    callers: Callers, results: Results, in_flight: int, wait_s: float, args: Any
) -> dict[str, float]:
    """Rounds of all paths in turns, the first of which warms up; the median of each in seconds."""
    took: dict[str, list[float]] = {path: [] for path in PATHS}
    rounds: dict[str, list[float]] = {path: [] for path in PATHS}
    rates: dict[str, list[float]] = {path: [] for path in PATHS}
    costs: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(args.rounds + 1):
        for path in PATHS:
            one_round: list[float] = []
            num_talks = max(1, args.calls // in_flight // NUM_TURNS)
            talks = [[Talk(wait_s) for _ in range(num_talks)] for _ in range(in_flight)]
            before = Cpu.now(callers.servers[path])
            await asyncio.gather(*(play(callers.make(path), mine, one_round) for mine in talks))
            after = Cpu.now(callers.servers[path])
            if number:
                took[path] += one_round
                rounds[path].append(median(one_round))
                rates[path].append(len(one_round) / (after.at_s - before.at_s))
                costs[path].append((after.of_s - before.of_s) / len(one_round))
    for path, values in took.items():
        ordered = sorted(values)
        results.add(
            part="latency",
            path=path,
            in_flight=in_flight,
            engine_ms=1e3 * wait_s,
            calls=len(ordered),
            p50_ms=1e3 * median(rounds[path]),
            p99_ms=1e3 * ordered[int(len(ordered) * 0.99)],
            calls_per_s=median(rates[path]),
            server_cpu_ms_per_call=1e3 * median(costs[path]),
        )
    return {path: median(values) for path, values in rounds.items()}


async def measure_sessions(world: World, results: Results, num: int) -> None:
    """Many sessions at once, each with a call that waits for the model."""
    callers = [HttpCaller(world) for _ in range(num)]
    talks = [Talk(_SESSION_WAIT_S) for _ in callers]
    for caller, talk in zip(callers, talks, strict=True):
        await caller.begin(talk)
    took_s: list[float] = []

    async def one(caller: HttpCaller, talk: Talk) -> None:
        begun_s = time.perf_counter()
        await caller.call(0)
        took_s.append(time.perf_counter() - begun_s - talk.waits_s[0])
        await caller.end()

    before = Cpu.now(world.gateway)
    await asyncio.gather(*map(one, callers, talks))
    after = Cpu.now(world.gateway)
    took_s.sort()
    results.add(
        part="sessions",
        path="gateway",
        in_flight=num,
        engine_ms=1e3 * _SESSION_WAIT_S,
        calls=num,
        p50_ms=1e3 * median(took_s),
        p99_ms=1e3 * took_s[int(num * 0.99)],
        calls_per_s=num / (after.at_s - before.at_s),
        server_cpu_ms_per_call=1e3 * (after.of_s - before.of_s) / num,
        rss_mib=world.gateway.memory_info().rss / 2**20,
    )
    results.at_least("sessions served at once", len(took_s), num)


def make_client(kind: str) -> Any:
    """The client of this name, without bounds."""
    if kind == "tailrace":
        return make_http_client("httpx2")
    library: Any = httpx if kind == "httpx" else httpx2
    limits = library.Limits(max_connections=None, max_keepalive_connections=None)
    return library.AsyncClient(limits=limits, timeout=library.Timeout(None))


async def measure_pool(world: World, results: Results, num: int, client: str) -> float:
    """CPU of this process for `num` calls that wait at once; in seconds."""
    opened = await world.open()
    wait_s = max(1.0, num / 400)  # all of them are to wait at once
    prompt = {"prompt": f"Think. @{wait_s}@"}
    headers = {"authorization": f"Bearer {opened.api_key}"}
    async with make_client(client) as http:

        async def one() -> None:
            answer = await http.post(f"{opened.base_url}/completions", json=prompt, headers=headers)
            assert answer.status_code == 200, answer.text

        started_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(num)))
        cpu_s = time.process_time() - cpu_s
        wall_s = time.perf_counter() - started_s
    results.add(
        part="pool",
        path=client,
        in_flight=num,
        engine_ms=1e3 * wait_s,
        calls=num,
        wall_s=wall_s,
        client_cpu_ms_per_call=1e3 * cpu_s / num,
    )
    return cpu_s


async def measure_pools(world: World, results: Results, args: Any) -> None:
    """All clients and sizes; what grows too much is not asked for more."""
    for client in ("tailrace", "httpx2", "httpx"):
        costs: dict[int, float] = {}
        for num in args.pool:
            previous = next(reversed(costs), num)
            expected_s = costs.get(previous, 0.0) * (num / previous) ** 2
            if client == "tailrace" or expected_s <= args.patience:
                costs[num] = await measure_pool(world, results, num, client)
        if client == "tailrace":
            first, last = args.pool[0], args.pool[-1]
            grown = costs[last] / last / (costs[first] / first)
            results.at_most(f"client CPU a call, {last} waiting over {first}", grown, 2.0)


async def run(args: argparse.Namespace, folder: Path) -> Results:
    """All parts."""
    results = Results("gateway", PACKAGES, calls=args.calls, rounds=args.rounds, turns=NUM_TURNS)
    async with world_of(folder) as world:
        async with Callers(world) as callers:
            await measure_latency(callers, results, 16, 0.0, args)
            for in_flight, wait_s in ((1, 0.0), (16, 0.05)):
                p50_s = await measure_latency(callers, results, in_flight, wait_s, args)
                added_ms = 1e3 * (p50_s["gateway"] - p50_s["direct"])
                results.at_most(f"added p50 in ms at {in_flight} in flight", added_ms, 2.0)
        await measure_sessions(world, results, args.sessions)
        await measure_pools(world, results, args)
    return results


def main() -> int:
    """Measure, print, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--pool", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--patience", type=float, default=30.0)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as a cluster sets it
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(run(args, Path(folder)))
    results.show()
    print(results.write())
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
