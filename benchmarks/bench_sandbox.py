"""Confined Python calls per second, one after the other, beside a cold confined interpreter per call.

Run it with `make bench-sandbox`. Everything is pinned to one core: service and sandbox together. The
cold side starts an interpreter with the same confinement for each call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.results import Results
from tailrace_sandbox.adapters.place import Place, prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Work

WORK = Work("python", "print(sum(range(100)))", 10.0)


async def measure(call: Callable[[], Awaitable[None]], count: int) -> tuple[float, float, float]:
    """Calls per second, and the median and 99th percentile of one call in ms."""
    took_s = []
    began_s = time.perf_counter()
    for _ in range(count):
        one_s = time.perf_counter()
        await call()
        took_s.append(time.perf_counter() - one_s)
    rate = count / (time.perf_counter() - began_s)
    percentiles = statistics.quantiles(took_s, n=100)
    return rate, percentiles[49] * 1e3, percentiles[98] * 1e3


async def warm_call(runner: Runner) -> None:
    """One call on a process that waits for it."""
    outcome = await runner.run(WORK)
    assert outcome.stdout == "4950\n", outcome


async def cold_call(place: Place) -> None:
    """One call on a process that is started for it."""
    runner = Runner(place)
    await warm_call(runner)
    await runner.close_processes()


async def compare(count: int, cold_count: int) -> Results:
    """Both sides in the same process."""
    results = Results("sandbox", ("tailrace",), num_calls=count, num_cold_calls=cold_count)
    place = await prepare(SandboxConfig(max_concurrency=1))
    runner = Runner(place)
    await measure(lambda: warm_call(runner), 50)
    rate, p50_ms, p99_ms = await measure(lambda: warm_call(runner), count)
    results.add(what="confined python calls", calls_per_s=rate, p50_ms=p50_ms, p99_ms=p99_ms)
    cold_rate, cold_p50_ms, cold_p99_ms = await measure(lambda: cold_call(place), cold_count)
    results.add(
        what="cold confined interpreter per call",
        calls_per_s=cold_rate,
        p50_ms=cold_p50_ms,
        p99_ms=cold_p99_ms,
    )
    results.at_least("confined python calls/s, one at a time on one core", rate, 300.0)
    await runner.close()
    return results


def main() -> int:
    """Measure, print the table and write it; the exit code says whether the target holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--cold-count", type=int, default=30)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = asyncio.run(compare(args.count, args.cold_count))
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
