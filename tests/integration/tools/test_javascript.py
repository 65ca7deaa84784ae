"""The example worker in plain JavaScript, with nats.js from npm, serves our own client."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.tools import ToolClient, ToolDeadlines, ToolErrorKind
from tailrace_protos.chat import ToolCall
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_worker_js"


@pytest.fixture(scope="module")
def package() -> Path:
    """The example with what it needs from npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if not (EXAMPLE / "node_modules" / "nats").is_dir():
        argv = ["npm", "ci", "--no-audit", "--no-fund"]
        installed = subprocess.run(argv, cwd=EXAMPLE, capture_output=True, text=True, check=False)
        assert installed.returncode == 0, installed.stdout + installed.stderr
    return EXAMPLE


@pytest.fixture
def worker(package: Path, nats_server: ServerProcess) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["node", "worker.js"],
        cwd=package,
        env={**os.environ, "TAILRACE_NATS_URL": nats_server.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving js_reverse, js_wait as "), line
    yield process
    process.kill()
    process.wait()


async def test_a_worker_in_javascript_serves_lists_refuses_and_dies_like_any_other(
    worker: subprocess.Popen[str], nats_server: ServerProcess, run_name: str
) -> None:
    bus = await Bus.connect(endpoints_of(nats_server.url), name="caller", run=run_name)
    deadlines = ToolDeadlines(probe_s=0.2, absent_after_s=0.5)
    client = ToolClient(bus, run_name, deadlines=deadlines)
    async with client.session("e", ["js_reverse", "js_wait"]) as tools:
        reverse, wait = await tools.schemas()
        assert reverse.parameters["required"] == ["text"]
        assert wait.description == "Wait for some milliseconds."

        turned = await tools.call(ToolCall("c", "js_reverse", '{"text": "stressed \u00fc"}'))
        assert turned.content == "\u00fc desserts"
        wrong = await tools.call(ToolCall("c", "js_reverse", '{"text": 3}'))
        assert wrong.error_kind is ToolErrorKind.INVALID_ARGUMENTS
        raised = await tools.call(ToolCall("c", "js_wait", '{"ms": 20000}'))
        assert raised.error_kind is ToolErrorKind.RAISED
        late = await tools.call(ToolCall("c", "js_wait", '{"ms": 9000}'), timeout_s=0.1)
        assert late.content == "js_wait did not answer within 0.1 s"

        calls = [tools.call(ToolCall("c", "js_wait", '{"ms": 100}')) for _ in range(40)]
        assert {result.content for result in await asyncio.gather(*calls)} == {"waited 100 ms"}

        calling = asyncio.create_task(tools.call(ToolCall("c", "js_wait", '{"ms": 9000}')))
        while (await _load(client))["num_running"] == 0:
            await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.wait({calling})
        while (await _load(client))["num_running"] > 0:
            await asyncio.sleep(0.01)

        calling = asyncio.create_task(tools.call(ToolCall("c", "js_wait", '{"ms": 9000}')))
        while (await _load(client))["num_running"] == 0:
            await asyncio.sleep(0.01)
        worker.kill()
        assert "died" in (await asyncio.wait_for(calling, 60)).infra_error
    await client.close()
    await bus.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"null",
        b"3",
        b"[]",
        b'{"type": "call_tool", "name": "constructor", "call_id": "c"}',
        b'{"type": "call_tool", "name": "toString", "call_id": "c"}',
        b'{"type": "cancel_tools", "call_ids": {}}',
        b'{"type": "probe_tools", "call_ids": 3}',
    ],
)
async def test_a_worker_in_javascript_survives_nonsense(
    payload: bytes, worker: subprocess.Popen[str], nats_server: ServerProcess, run_name: str
) -> None:
    bus = await Bus.connect(endpoints_of(nats_server.url), name="caller", run=run_name)
    for _ in range(2):  # the second finds it alive
        answer = await bus.connection.client.request("tool.js_reverse", payload, 10)
        assert (answer.headers or {})["Nats-Service-Error-Code"] == "400"
    assert worker.poll() is None
    await bus.close()


async def _load(client: ToolClient) -> dict[str, int]:
    """Description by the worker of itself; waits until it answers."""
    while True:
        for worker in (await client.discovery.stats(await client.discovery.workers())).values():
            for endpoint in worker.endpoints:
                if endpoint.subject == "tool.js_wait":
                    return endpoint.data or {}
