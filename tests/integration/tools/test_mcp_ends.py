"""Ends of calls of an MCP server's tools when their worker or the server ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.tools import ToolClient
from tailrace.tools.mcp import McpServer
from tailrace_protos.chat import ToolCall
from tests.integration.tools.conftest import Serve
from tests.integration.tools.test_command_line import serving
from tests.world.servers import ServerProcess, free_port, wait_for_port
from tests.world.serving import eventually

SERVER = Path(__file__).with_name("mcp_process.py")


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    with http_process(free_port()) as url:
        yield url


@contextmanager
def http_process(port: int, *options: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, process, 60.0)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["stdio", "http"])
def target(request: pytest.FixtureRequest) -> str:
    """What to serve: a command line, or a URL."""
    if request.param == "stdio":
        return f"{sys.executable} {SERVER}"
    url: str = request.getfixturevalue("http_server")
    return url


def call(gate: Path, name: str = "held") -> ToolCall:
    return ToolCall("c", name, json.dumps({"gate": str(gate)}))


async def begun(gate: Path) -> int:
    """The process that runs the call, once it does."""
    file = gate.with_suffix(".begun")
    await eventually(file.exists, 60.0)
    return int(file.read_text())


async def test_a_call_that_runs_when_its_worker_gets_sigterm_is_finished(
    client: ToolClient, nats_server: ServerProcess, target: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    option = "--mcp-url" if target.startswith("http") else "--mcp"
    arguments = (option, target, "--run", client.run, "--drain-s", "100")
    with serving(nats_server.url, *arguments) as process:
        async with client.session("e", ["held"]) as tools:
            calling = asyncio.create_task(tools.call(call(gate)))
            await begun(gate)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while '"stopping"' not in await asyncio.to_thread(process.stderr.readline):
                assert process.poll() is None
            gate.with_suffix(".open").touch()
            result = await asyncio.wait_for(calling, 60)
        assert (result.content, result.is_error, result.infra_error) == ("done", False, "")
        assert await asyncio.to_thread(process.wait, 60) == 0


async def test_a_call_that_does_not_end_while_its_worker_drains_is_an_infrastructure_failure(
    client: ToolClient, serve: Serve, target: str, tmp_path: Path
) -> None:
    server = McpServer(target)
    connected = asyncio.create_task(server.run())
    worker = await serve(*await server.offers(60.0))
    async with client.session("e", ["held"]) as tools:
        calling = asyncio.create_task(tools.call(call(tmp_path / "gate")))
        await begun(tmp_path / "gate")
        await worker.drain(0.2)
        result = await asyncio.wait_for(calling, 60)
    assert result.infra_error == "the tool worker was shut down"
    connected.cancel()
    await asyncio.wait({connected})


async def test_a_call_whose_mcp_server_is_killed_is_an_infrastructure_failure_and_the_next_one_works(
    client: ToolClient, serve: Serve, tmp_path: Path
) -> None:
    server = McpServer(f"{sys.executable} {SERVER}")
    connected = asyncio.create_task(server.run())
    await serve(*await server.offers(60.0))
    async with client.session("e", ["held"]) as tools:
        calling = asyncio.create_task(tools.call(call(tmp_path / "gate")))
        os.kill(await begun(tmp_path / "gate"), signal.SIGKILL)
        lost = await asyncio.wait_for(calling, 60)
        assert "held is not available: MCP server" in lost.infra_error
        (tmp_path / "next.open").touch()
        async with asyncio.timeout(60):
            while (result := await tools.call(call(tmp_path / "next"))).infra_error:
                await asyncio.sleep(0.05)
    assert result.content == "done"
    connected.cancel()
    await asyncio.wait({connected})


async def test_a_server_of_one_thread_is_not_taken_for_lost_while_it_works(
    client: ToolClient, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = McpServer(f"{sys.executable} {SERVER}", check_every_s=4.0)
    connected = asyncio.create_task(server.run())
    await serve(*await server.offers(60.0))
    async with client.session("e", ["busy"]) as tools:
        calling = asyncio.create_task(tools.call(call(tmp_path / "gate", "busy")))
        await begun(tmp_path / "gate")
        monkeypatch.setattr(server, "_check_every_s", 0.05)  # only now: idle servers may be slow
        _, waiting = await asyncio.wait({calling}, timeout=6.0)  # a check came and went
        assert waiting
        (tmp_path / "gate.open").touch()
        result = await asyncio.wait_for(calling, 60)
    assert (result.content, result.infra_error) == ("done", "")
    connected.cancel()
    await asyncio.wait({connected})


async def test_a_server_that_hangs_is_ended_also_while_its_connection_is_being_closed(
    client: ToolClient, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = McpServer(f"{sys.executable} {SERVER}", check_every_s=4.0)
    connected = asyncio.create_task(server.run())
    await serve(*await server.offers(60.0))
    (tmp_path / "gate.open").touch()
    async with client.session("e", ["held"]) as tools:
        assert (await tools.call(call(tmp_path / "gate"))).content == "done"
    process_id = await begun(tmp_path / "gate")
    os.kill(process_id, signal.SIGSTOP)
    monkeypatch.setattr(server, "_check_every_s", 0.05)
    await eventually(lambda: server._is_closing, 60.0)
    server.stop(connected)
    ended, _ = await asyncio.wait({connected}, timeout=60)
    assert ended
    assert not Path(f"/proc/{process_id}").exists()


async def test_a_server_over_http_that_starts_again_is_no_error_of_the_tool(
    client: ToolClient, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    with http_process(port, "older") as target:
        server = McpServer(target, check_every_s=60.0)
        connected = asyncio.create_task(server.run())
        await serve(*await server.offers(60.0))
    with http_process(port, "older"):
        (tmp_path / "gate.open").touch()
        async with client.session("e", ["held"]) as tools, asyncio.timeout(60):
            lost = await tools.call(call(tmp_path / "gate"))
            assert "held is not available: MCP server" in lost.infra_error
            while (result := await tools.call(call(tmp_path / "gate"))).infra_error:
                await asyncio.sleep(0.05)
        assert (result.content, result.is_error) == ("done", False)
        connected.cancel()
        await asyncio.wait({connected})
