"""Keys of the section `cluster`: changing one changes its servers, and how long it restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.store import connect
from tailrace_cli.cluster.local import LocalCluster
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.servers import nats_server_binary, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tailrace_cli.experiment import decode
from tests.world.servers import free_port

BROKEN = ProcessSpec("broken", ["/bin/false"])


class BareCluster(LocalCluster):
    """Servers, and instead of the services what a test wants."""

    specs: Sequence[ProcessSpec] = ()

    def _plan(self, _: object) -> list[ProcessSpec]:
        return list(self.specs)


@asynccontextmanager
async def cluster(folder: Path, *specs: ProcessSpec, **section: Any) -> AsyncIterator[BareCluster]:
    content = {
        "exp_name": "keyed",
        "output_dir": str(folder),
        "scheduler": {"tags": ["lake"]},
        "cluster": {"min_free_disk_bytes": 0, **section},
    }
    made = BareCluster(decode(content, "experiment.yaml"))
    made.specs = specs
    async with made:
        yield made


def starter(folder: Path, binary: str) -> tuple[str, Path]:
    """A program that leaves a mark and becomes `binary`; and where the mark is."""
    program, mark = folder / f"my-{Path(binary).name}", folder / f"{Path(binary).name}.mark"
    program.write_text(f'#!/bin/sh\ntouch "{mark}"\nexec "{binary}" "$@"\n')
    program.chmod(0o755)
    return str(program), mark


async def test_servers_are_those_and_where_the_section_says(tmp_path: Path) -> None:
    port, nats_port = free_port(), free_port()
    nats, nats_mark = starter(tmp_path, nats_server_binary(ClusterConfig()))
    redis_server, redis_mark = starter(tmp_path, redis_server_binary(ClusterConfig()))
    binaries = {"nats_server_binary": nats, "redis_server_binary": redis_server}
    ports = {"nats_port": nats_port, "redis_port": port}
    async with cluster(tmp_path, **ports, **binaries, redis_fsync="always") as made:
        assert (nats_mark.exists(), redis_mark.exists()) == (True, True)
        assert made.endpoints.redis_url.endswith(f"@127.0.0.1:{port}/0")
        assert made.endpoints.nats_url.endswith(f"127.0.0.1:{nats_port}")
        assert await fsync_of(made) == "always"


async def test_redis_fsync_is_every_second_by_default(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        assert await fsync_of(made) == "everysec"


async def fsync_of(made: LocalCluster) -> str:
    """Setting of the running Redis."""
    connection = await connect(made.endpoints.redis_url)
    _, value = await connection.pipeline.command("CONFIG", "GET", "appendfsync")
    await connection.aclose()
    return str(value.decode())


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_max_restarts(tmp_path: Path, max_restarts: int) -> None:
    async with cluster(tmp_path, BROKEN, max_restarts=max_restarts) as made:
        await asyncio.wait_for(made.supervisor.failed, 10)
        assert made.supervisor.num_restarts.get("broken", 0) == max_restarts


async def test_restart_window_s(tmp_path: Path) -> None:
    """Failures before the window do not count: a process that fails more slowly is kept."""
    async with cluster(tmp_path, BROKEN, max_restarts=1, restart_window_s=0.05) as made:
        async with asyncio.timeout(10):
            while made.supervisor.num_restarts.get("broken", 0) < 4:
                await asyncio.sleep(0.01)
        assert not made.supervisor.failed.done()
