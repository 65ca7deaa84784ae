"""Fixtures of many tests: one real nats-server and one Redis per session, and connections to them."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tailrace import processor
from tailrace.bus import Bus, StreamLimits
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection, connect
from tests.world.servers import ServerProcess, make_nats_server, make_redis_server
from tests.world.serving import endpoints_of

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A slow or paused machine fails no test; without this, that is so only where `CI` is set.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
PATIENT = settings.get_profile("patient")
settings.register_profile("same", PATIENT, derandomize=True)  # the same examples in each run
settings.register_profile("new", PATIENT, print_blob=True)  # HYPOTHESIS_PROFILE=new draws others
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
ESCAPE_ATTEMPT = ("escape_attempt", True)  # a property of tests that ask the sandbox for a way out


def pytest_configure() -> None:
    """Collects no garbage while thousands of modules and tests are read: none of that is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Begins to collect what the tests leave, without ever looking through what was read."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports the number of tried ways out of the sandbox, and of those tests that failed.

    It is in this file because the process that reports reads no other conftest.
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


@pytest.fixture(scope="session", autouse=True)
def _loggers_follow_the_newest_configuration() -> Iterator[None]:
    """Let a test see a module's lines, whatever other tests of this process configured before."""
    configure, uncached = structlog.configure, {"cache_logger_on_first_use": False}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(structlog, "configure", lambda **given: configure(**given | uncached))
        yield


@pytest.fixture(autouse=True)
def _logs_are_as_before() -> Iterator[None]:
    """Take back what a test configured: a command in this process may leave warnings out."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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
def run_name() -> Iterator[str]:
    """A run name no other test uses. Shared memory of its killed services goes, as in a run."""
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    for hidden in ("", "."):
        for segment in Path("/dev/shm").glob(f"{hidden}tailrace.{name}*"):
            segment.unlink(missing_ok=True)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: the path of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a module of a user by name and source; this process and its children can import it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    names: set[str] = set()

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        names.add(name)
        sys.modules.pop(name, None)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def endpoints(nats_server: ServerProcess, redis_server: ServerProcess) -> Endpoints:
    return Endpoints(nats_url=nats_server.url, redis_url=redis_server.url, host_id="this-host")


@pytest.fixture
async def bus(nats_server: ServerProcess, run_name: str) -> AsyncIterator[Bus]:
    connected = await Bus.connect(endpoints_of(nats_server.url), name="test", run=run_name)
    yield connected
    await connected.close()


@pytest.fixture
async def run_bus(bus: Bus) -> Bus:
    """With streams; an unacknowledged message comes again after 1 s."""
    await bus.provision_run(bus.run, StreamLimits(ack_wait_s=1.0))
    return bus


@pytest.fixture
async def redis(redis_server: ServerProcess) -> AsyncIterator[StoreConnection]:
    connection = await connect(redis_server.url)
    yield connection
    await connection.aclose()


@pytest.fixture
def outbox(redis: StoreConnection, run_name: str) -> Outbox:
    return Outbox(redis, run_name)
