"""Tools under the permissions that a local cluster gives its NATS users, with its own configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tailrace.bus import Bus
from tailrace.sdk import Tool, tool
from tailrace.tools import ToolClient, ToolWorker
from tailrace_cli.cluster.servers import Credentials, nats_command
from tailrace_cli.config import ClusterConfig
from tailrace_protos.chat import ToolCall
from tests.integration.tools.conftest import SHORT_DEADLINES
from tests.world.servers import ServerProcess, free_port
from tests.world.serving import endpoints_of, eventually, eventually_async

RUN = "guarded"
PASSWORDS = {"agents": "a", "tools": "t", "sandbox": "s", "cli": "c"}


@tool
def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


class Counter(Tool):
    """Counts its calls, and says which sessions it released."""

    name = "counter"
    description = "How many calls there were."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}
    released: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self._num_calls = 0

    async def execute(self, arguments: dict[str, Any]) -> str:
        """Count."""
        self._num_calls += 1
        return str(self._num_calls)

    async def release(self) -> None:
        """Say so."""
        self.released.append(self._num_calls)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A nats-server as `tailrace train` configures it."""
    state, port = tmp_path_factory.mktemp("state"), free_port()
    argv = nats_command(ClusterConfig(), Path(state), port, RUN, Credentials(PASSWORDS, {}))
    server = ServerProcess(argv, port, f"nats://127.0.0.1:{port}")
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def connected(server: ServerProcess, user: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(endpoints_of(server.url, user, PASSWORDS[user]), name=user, run=RUN)
    yield bus
    await bus.close()


@pytest.mark.parametrize("caller", ["agents", "cli"])
@pytest.mark.parametrize("run", [RUN, ""])
async def test_every_kind_of_message_between_callers_and_workers_is_allowed(
    guarded: ServerProcess, caller: str, run: str
) -> None:
    Counter.released.clear()
    async with connected(guarded, "tools") as theirs, connected(guarded, caller) as ours:
        worker = ToolWorker([double, Counter], theirs, run=run)
        await worker.start()
        client = ToolClient(ours, RUN, deadlines=SHORT_DEADLINES)
        async with client.session("e", ["double", "counter"]) as tools:
            assert [schema.name for schema in await tools.schemas()] == ["double", "counter"]
            assert (await tools.call(ToolCall("c", "double", '{"number": 4}'))).content == "8"
            counts = [(await tools.call(ToolCall("c", "counter", "{}"))).content for _ in range(20)]
            assert counts == [str(number) for number in range(1, 21)]
        await eventually(lambda: Counter.released == [20])

        async def has_load() -> bool:
            return bool(await client.discovery.stats(await client.discovery.workers()))

        await eventually_async(has_load)
        await client.close()
        await worker.drain(5.0)
