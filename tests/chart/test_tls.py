"""NATS and Redis with the certificates and files that the chart renders, and our own clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import StoreUnavailableError, connect
from tests.chart.conftest import ROOT, Objects, Render
from tests.world.servers import free_port

UNPACKED = ROOT / ".redis-tls"
_LIBRARIES = ":".join(map(str, UNPACKED.glob("usr/lib/*-linux-gnu")))
MISSING = "no Redis with TLS: `make .redis-tls/ready`"


@pytest.fixture(scope="module")
def objects(render: Render) -> Objects:
    return render("laptop-cpu", {"tls": {"enabled": True}})


@contextmanager
def server(folder: Path, objects: Objects, name: str, program: list[str], port: int) -> Iterator[Path]:
    """A server whose files are those of its pod; yields the folder of its certificates."""
    files = {"tls": objects["Secret", "demo-tls"], name: objects["Secret", f"demo-{name}-config"]}
    for mount, secret in files.items():
        (folder / mount).mkdir()
        for file, text in secret["stringData"].items():
            for path in ("/etc/tls", f"/etc/{name}"):
                text = text.replace(path, f"{folder}{path.removeprefix('/etc')}")
            text = text.replace(" +client|setinfo", "")  # Debian 12's Redis 7.0 does not know it
            text = text.replace("/data", str(folder)).replace("6379", f"{port}")
            text = text.replace(":4222", f":{port}").replace(":8222", f":{free_port()}")
            (folder / mount / file).write_text(text)
    log = (folder / "log").open("wb")
    environment = {**os.environ, "LD_LIBRARY_PATH": _LIBRARIES if name == "redis" else ""}
    process = subprocess.Popen(
        [*program, *_options(name, folder)], stdout=log, stderr=log, env=environment
    )
    try:
        yield folder / "tls" / "ca.crt"
    finally:
        process.kill()
        process.wait()
        log.close()


def _options(name: str, folder: Path) -> list[str]:
    if name == "redis":
        return [str(folder / "redis" / "redis.conf")]
    return ["-c", str(folder / "nats" / "nats.conf")]


def endpoints(objects: Objects, scheme: str, port: int, ca_file: Path | str) -> Endpoints:
    """Addresses of the user `agents`, as its pod's environment has them."""
    secret = objects["Secret", "demo-agents"]["stringData"]
    urls = {"nats": "tls://localhost:1", "redis": "rediss://localhost:1/0"}
    urls["redis" if scheme.startswith("redis") else "nats"] = f"{scheme}://localhost:{port}"
    return Endpoints.from_env(
        {
            "TAILRACE_NATS_URL": urls["nats"],
            "TAILRACE_REDIS_URL": urls["redis"],
            "TAILRACE_NATS_USER": "agents",
            "TAILRACE_REDIS_USER": "agents",
            "TAILRACE_NATS_PASSWORD": secret["nats-password"],
            "TAILRACE_REDIS_PASSWORD": secret["redis-password"],
            "TAILRACE_CA_FILE": str(ca_file),
        }
    )


def redis_with_tls() -> str:
    """Program of a Redis that has TLS; empty: none is here."""
    found = shutil.which("redis-server", path=f"{UNPACKED}/usr/bin")
    return found or ""


@pytest.mark.skipif(not redis_with_tls(), reason=MISSING)
async def test_services_reach_redis_over_tls_alone(tmp_path: Path, objects: Objects) -> None:
    port = free_port()
    with server(tmp_path, objects, "redis", [redis_with_tls()], port) as ca_file:
        store = await connect(endpoints(objects, "rediss", port, ca_file).redis_url, wait_s=60)
        await store.ping()  # raises if nothing answers
        await store.aclose()
        for scheme, certificates in (
            ("redis", ca_file),
            ("rediss", ""),
        ):  # no TLS; an unknown authority
            with pytest.raises(StoreUnavailableError):
                await connect(endpoints(objects, scheme, port, certificates).redis_url, wait_s=1)


async def test_services_reach_nats_over_tls_alone(tmp_path: Path, objects: Objects) -> None:
    port = free_port()
    program = [str(ROOT / ".venv" / "bin" / "nats-server")]
    with server(tmp_path, objects, "nats", program, port) as ca_file:
        async with asyncio.timeout(60):
            bus = await Bus.connect(endpoints(objects, "tls", port, ca_file), name="agents")
        assert bus.connection.is_connected
        await bus.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await Bus.connect(endpoints(objects, "tls", port, ""), name="stranger")
