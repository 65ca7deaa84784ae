"""The embedded servers keep a run's data in its folder, whatever characters the folder's name has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import ConfigError, Endpoints
from tailrace.store import connect
from tailrace_cli.cluster.servers import (
    Credentials,
    ServerAddresses,
    connection_environment,
    nats_command,
    redis_command,
)
from tailrace_cli.config import ClusterConfig
from tests.world.servers import ServerProcess, free_port

RUN = "odd"
Command = Callable[[ClusterConfig, Path, int, str, Credentials], list[str]]


def started(command: Command, folder: Path, keys: Credentials) -> ServerProcess:
    port = free_port()
    server = ServerProcess(command(ClusterConfig(), folder, port, RUN, keys), port, "")
    server.start()
    return server


@pytest.mark.parametrize(
    "name", ["josé 日本", "[1] *?", '"quoted"', r"back\d[slash", os.fsdecode(b"caf\xe9")]
)
async def test_the_servers_start_below_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    keys = Credentials.load_or_make(folder)
    servers = []
    try:
        servers += [started(nats_command, folder, keys), started(redis_command, folder, keys)]
        nats, redis = (server.port for server in servers)
        addresses = ServerAddresses(
            f"nats://127.0.0.1:{nats}", f"redis://127.0.0.1:{redis}/0", keys.nats, keys.redis
        )
        endpoints = Endpoints.from_env(connection_environment("scheduler", addresses))
        bus = await Bus.connect(endpoints, name="scheduler", run=RUN)
        await bus.close()
        store = await connect(endpoints.redis_url)
        await store.ping()
        await store.aclose()
    finally:
        for server in servers:
            server.kill()
    assert (folder / "nats" / "jetstream").is_dir()
    assert (folder / "redis" / "appendonlydir").is_dir()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"nats": {"cli": 7}}', b"\xff"])
def test_damaged_credentials_are_told_by_their_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"credentials\.json is damaged"):
        Credentials.load_or_make(tmp_path)
