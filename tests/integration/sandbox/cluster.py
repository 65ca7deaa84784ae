"""The part of a local cluster that tools need: its servers with their permissions, and sandboxes.

Configuration, command lines, environments and NATS users are those that `tailrace train` makes of
`cluster.num_sandboxes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import connect
from tailrace.tools import EpisodeTools, ToolClient, ToolDeadlines
from tailrace_cli.cluster.plan import Site, service_specs
from tailrace_cli.cluster.servers import (
    Credentials,
    ServerAddresses,
    connection_environment,
    nats_command,
    redis_command,
)
from tailrace_cli.config import ClusterConfig
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import ToolResult
from tests.world.servers import ServerProcess, free_port

RUN = "sandboxed"
TOOLS = ("python", "shell", "python_session")
DEADLINE_S = 90.0
# A dead worker is noticed soon; one that a slow machine keeps busy is not taken for dead.
DEADLINES = ToolDeadlines(
    probe_s=0.1, absent_after_s=0.5, silent_after_s=60.0, accept_s=60.0, nobody_s=120.0
)


class Sandbox:
    """A sandbox service in a process of its own, and what it started."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(argv, env=env, stdout=output, stderr=output)

    def zygotes(self) -> list[psutil.Process]:
        """Processes that wait for calls, or run one."""
        return children(psutil.Process(self.process.pid))

    def running_calls(self) -> list[psutil.Process]:
        """First processes of calls."""
        return [child for zygote in self.zygotes() for child in children(zygote)]

    def family(self) -> list[psutil.Process]:
        """Everything that it started."""
        return children(psutil.Process(self.process.pid), recursive=True)

    def base(self) -> Path:
        """Parent of the folders of its calls."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return Path(next(line["base"] for line in lines if line.get("base")))

    def ends(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        """End it, whatever it is doing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(DEADLINE_S)


class Cluster:
    """Servers, and as many sandboxes as a test starts."""

    def __init__(self, folder: Path, section: dict[str, Any]) -> None:
        self._folder = folder
        self._keys = Credentials.load_or_make(folder)
        ports = free_port(), free_port()
        config = ClusterConfig()
        self._servers = [
            ServerProcess(nats_command(config, folder, ports[0], RUN, self._keys), ports[0], ""),
            ServerProcess(redis_command(config, folder, ports[1], RUN, self._keys), ports[1], ""),
        ]
        self._connection = ServerAddresses(
            nats_url=f"nats://127.0.0.1:{ports[0]}",
            redis_url=f"redis://127.0.0.1:{ports[1]}/0",
            nats_passwords=self._keys.nats,
            redis_passwords=self._keys.redis,
        )
        (folder / "config.yaml").write_text(json.dumps({"exp_name": RUN, "sandbox": section}))
        self.sandboxes: list[Sandbox] = []

    def start(self, num_sandboxes: int) -> None:
        """Servers, then the sandboxes of `cluster.num_sandboxes`."""
        for server in self._servers:
            server.start()
        for index in range(num_sandboxes):
            self.start_sandbox(index, num_sandboxes)

    def start_sandbox(self, index: int = 0, num_sandboxes: int = 1) -> Sandbox:
        """One of them, as the cluster's supervisor starts it, also the second time."""
        site = Site(self._folder / "config.yaml", self._folder, self._connection, num_threads=1)
        specs = service_specs(ClusterConfig(num_sandboxes=num_sandboxes), 0, site)
        spec = [spec for spec in specs if spec.name.startswith("sandbox")][index]
        log = self._folder / f"{spec.name}-{len(self.sandboxes)}.log"
        self.sandboxes.append(Sandbox(spec.argv, spec.env, log))
        return self.sandboxes[-1]

    @asynccontextmanager
    async def caller(self, user: str = "agents") -> AsyncIterator[ToolClient]:
        """A client with the rights of a service."""
        endpoints = Endpoints.from_env(connection_environment(user, self._connection))
        bus = await Bus.connect(endpoints, name=user, run=RUN)
        redis = await connect(endpoints.redis_url)
        client = ToolClient(bus, RUN, redis=redis, deadlines=DEADLINES)
        yield client
        await client.close()
        await redis.aclose()
        await bus.close()

    def close(self) -> None:
        """End everything."""
        for sandbox in self.sandboxes:
            sandbox.stop()
        for server in self._servers:
            server.kill()


def children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """None of a process that has ended meanwhile."""
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


async def call(tools: EpisodeTools, name: str, **arguments: Any) -> ToolResult:
    """One call, as a model writes it."""
    call_id = f"call{os.urandom(4).hex()}"
    return await asyncio.wait_for(
        tools.call(ToolCall(call_id, name, msgspec.json.encode(arguments).decode())), DEADLINE_S
    )


async def until(condition: Callable[[], Any]) -> Any:
    """Waits until `condition` returns a true value, and returns it."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.02)
    return found
