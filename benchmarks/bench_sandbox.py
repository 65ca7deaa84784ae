"""Confined Python calls, one after the other, beside a fresh interpreter that confines itself per call.

Run it with `make bench-sandbox`. Everything is pinned to one core: service, zygote and calls together.
Both sides run the same program under the same Landlock rules, system call filter, limits and user, in
turns, so that a disturbance of the machine meets both. `cpu_ms` is processor time of all processes of a
call, which other work on the machine does not change. The last rows are the processor time of a zygote
that checks a call, as a share of one core: of one process that sleeps, of many, and of many that share
nearly as much memory as the limit allows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.results import Results
from tailrace_sandbox.adapters.place import Place, prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.adapters.zygote import ENVIRONMENT, SERVICES_DIR
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Work

CODE = "print(sum(range(100)))"
SHOWN = "4950\n"
WORK = Work("python", CODE, 10.0)
NUM_ROUNDS = 5
_COLD_UID = 64998
_COLD = f"""
import os, sys
sys.path.insert(0, {str(SERVICES_DIR)!r})
from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.core.policy import Confinement
from tailrace_sandbox.engine import kernel
from tailrace_sandbox.engine.confine import Plan, confine
base, uid, seccomp = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
kernel.bar_capabilities()
if uid >= 0:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
kernel.drop_capabilities()
plan = Plan.make(
    Confinement(os.uname().machine, uid >= 0, kernel.landlock_abi()),
    (sys.prefix, sys.base_prefix), seccomp=seccomp, num_processes_outside=64,
)
folder = f"{{base}}/cold-{{os.urandom(12).hex()}}"
os.mkdir(folder, 0o700)
os.chdir(folder)
confine(plan, folder, Limits(), None, 3)
exec({CODE!r})
"""

_QUIET = """
import time
began = time.monotonic()
time.sleep(10)
print(time.monotonic() - began)
"""

_MANY = """
import os, time
began = time.monotonic()
shared = b"x" * ({shared_mib} << 20)
kept = [open("f", "w") for _ in range(100)]
for _ in range(30):
    if os.fork() == 0:
        while time.monotonic() < began + 10:
            if {busy}:
                for _ in range(20000): pass
            time.sleep(0.001 if {busy} else 0.5)
        os._exit(0)
for _ in range(30): os.wait()
print(time.monotonic() - began)
"""
_FILES = "30 processes with 100 open files each"
_SHARED_MIB = 6  # of each; with what an interpreter has, 31 of them are near the limit of 512 MiB
CHECKED = {
    "one process, asleep": _QUIET,
    f"{_FILES}, asleep": _MANY.format(busy=False, shared_mib=0),
    f"{_FILES}, busy": _MANY.format(busy=True, shared_mib=0),
    f"{_FILES}, near the limit by shared memory, asleep": _MANY.format(
        busy=False, shared_mib=_SHARED_MIB
    ),
    f"{_FILES}, near the limit by shared memory, busy": _MANY.format(busy=True, shared_mib=_SHARED_MIB),
}


@dataclass
class Side:
    """Times of one way of calling."""

    what: str
    took_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def measure(self, call: Callable[[], Awaitable[None]], count: int) -> None:
        """Some more calls."""
        cpu_s = _cpu_s()
        for _ in range(count):
            began_s = time.perf_counter()
            await call()
            self.took_s.append(time.perf_counter() - began_s)
        self.cpu_s += _cpu_s() - cpu_s

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.took_s) / sum(self.took_s)

    @property
    def cpu_ms(self) -> float:
        """Processor time of one call, all processes together."""
        return self.cpu_s / len(self.took_s) * 1e3

    def report(self, results: Results) -> None:
        """As a row."""
        percentiles = statistics.quantiles(self.took_s, n=100)
        results.add(
            what=self.what,
            num_calls=len(self.took_s),
            calls_per_s=self.rate,
            p50_ms=percentiles[49] * 1e3,
            p99_ms=percentiles[98] * 1e3,
            cpu_ms=self.cpu_ms,
        )


def _cpu_s() -> float:
    """Processor time of this process, of its children that live, and of all that have ended."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    for pid in _children():
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        ticks = map(int, stat.rpartition(")")[2].split()[11:15])
        total += sum(ticks) / os.sysconf("SC_CLK_TCK")
    return total


async def warm_call(runner: Runner) -> None:
    """One call on a process that waits for it."""
    outcome = await runner.run(WORK)
    assert outcome.stdout == SHOWN, outcome


async def cold_call(place: Place) -> None:
    """One call on an interpreter that is started for it and confines itself."""
    uid = _COLD_UID if place.features.own_user else -1
    process = await asyncio.create_subprocess_exec(
        place.python, "-I", "-c", _COLD, place.base, str(uid), str(place.features.seccomp),
        cwd="/", env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    shown, _ = await process.communicate()
    assert shown.decode() == SHOWN, shown


async def share_of_checks(code: str) -> float:
    """Processor time of a zygote per second of a call, which prints how long it took."""
    runner = Runner(await prepare(SandboxConfig(max_concurrency=1)))
    await warm_call(runner)
    zygote = _children()[-1]
    before_s = _cpu_of(zygote)
    outcome = await runner.run(Work("python", code, 30.0))
    share = (_cpu_of(zygote) - before_s) / float(outcome.stdout)
    await runner.close()
    return share


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in path.read_text(encoding="ascii").split()]


def _cpu_of(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


async def compare(num_calls: int, num_cold_calls: int) -> Results:
    """Both sides in turns in the same process."""
    results = Results("sandbox", ("tailrace",), num_rounds=NUM_ROUNDS)
    place = await prepare(SandboxConfig(max_concurrency=1))
    runner = Runner(place)
    warm, cold = Side("confined python calls"), Side("a cold confined interpreter per call")
    await Side("not counted").measure(lambda: warm_call(runner), 50)
    for _ in range(NUM_ROUNDS):
        await warm.measure(lambda: warm_call(runner), num_calls // NUM_ROUNDS)
        await cold.measure(lambda: cold_call(place), num_cold_calls // NUM_ROUNDS)
    warm.report(results)
    cold.report(results)
    results.at_least("confined python calls/s, one at a time on one core", warm.rate, 300.0)
    results.at_most("processor time of a call in ms, all processes together", warm.cpu_ms, 3.0)
    results.at_least("times as fast as a cold confined interpreter", warm.rate / cold.rate, 4.0)
    await runner.close()
    for what, code in CHECKED.items():
        share = await share_of_checks(code)
        results.add(what=f"checks of {what}", share_of_a_core=share)
        results.at_most(f"share of a core for checks of {what}", share, 0.02)
    return results


def main() -> int:
    """Measure, print the table and write it; the exit code says whether the targets hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-calls", type=int, default=1500)
    parser.add_argument("--num-cold-calls", type=int, default=100)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:  # as the service
        results = loop.run(compare(args.num_calls, args.num_cold_calls))
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
