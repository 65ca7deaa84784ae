"""Keys of the section `cluster`: changing one changes its servers, and how long it restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.store import Blobs, connect
from tailrace_cli.cluster import local
from tailrace_cli.cluster.local import LocalCluster
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.servers import nats_server_binary, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tailrace_cli.experiment import decode
from tests.world.processes import handles, outlasting
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


async def test_nobody_else_gets_the_port_of_a_server_that_starts_or_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system chooses ports of its own for many a program, and never one that is in use."""

    def port_of_another(port: int) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))

    def begun(make: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def command(config: ClusterConfig, folder: Path, port: int, *more: Any) -> list[str]:
            with pytest.raises(OSError, match="in use"):
                port_of_another(port)
            return make(config, folder, port, *more)

        return command

    for name in ("nats_command", "redis_command"):
        monkeypatch.setattr(local, name, begun(getattr(local, name)))
    async with cluster(tmp_path) as made:
        port = int(made.endpoints.nats_url.rpartition(":")[2])
        with handles([psutil.Process(made.supervisor.pids["nats"])]) as found:
            os.kill(made.supervisor.pids["nats"], signal.SIGKILL)
            assert not outlasting(found, time.monotonic() + 60)
        with pytest.raises(OSError, match="in use"):
            port_of_another(port)


async def test_redis_fsync_is_every_second_by_default(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        assert await fsync_of(made) == "everysec"


async def fsync_of(made: LocalCluster) -> str:
    """Setting with which Redis was started: no user of a run may ask Redis itself."""
    lines = (made.state_dir / "redis.conf").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("appendfsync "))


async def test_files_and_environment_of_the_servers_are_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    previous = os.umask(0)
    try:
        async with cluster(tmp_path) as made:
            connection = await connect(made.endpoints.redis_url)
            await Blobs(connection, "keyed").put(b"x", 60)
            await connection.aclose()
            state = made.state_dir
            assert state.stat().st_mode & 0o777 == 0o700
            written = [path for path in state.rglob("*") if path.is_file()]
            assert any("appendonly" in path.name for path in written)
            open_to_others = [path for path in written if path.stat().st_mode & 0o077]
            assert [path for path in open_to_others if path.name != "lock"] == []
            for name in ("nats", "redis"):
                found = psutil.Process(made.supervisor.pids[name]).environ()
                assert set(found) <= {"PATH", "LANG", "LC_CTYPE"}
    finally:
        os.umask(previous)


async def test_tool_names_are_all_that_tool_workers_may_serve(tmp_path: Path) -> None:
    async with cluster(tmp_path, tool_names=["search"]) as made:
        users = json.loads((made.state_dir / "nats.conf").read_text())["authorization"]["users"]
        (tools,) = [each for each in users if each["user"] == "tools"]
        allowed = tools["permissions"]["subscribe"]["allow"]
        assert "tool.search" in allowed
        assert "tool.>" not in allowed


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_max_restarts(tmp_path: Path, max_restarts: int) -> None:
    async with cluster(tmp_path, BROKEN, max_restarts=max_restarts) as made:
        await asyncio.wait_for(made.supervisor.failed, 60)
        assert made.supervisor.num_restarts.get("broken", 0) == max_restarts


async def test_restart_window_s(tmp_path: Path) -> None:
    """Failures before the window do not count: a process that fails more slowly is kept."""
    async with cluster(tmp_path, BROKEN, max_restarts=1, restart_window_s=0.05) as made:
        async with asyncio.timeout(60):
            while made.supervisor.num_restarts.get("broken", 0) < 4:
                await asyncio.sleep(0.01)
        assert not made.supervisor.failed.done()
