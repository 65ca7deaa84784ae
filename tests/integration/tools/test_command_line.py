"""`tailrace tools serve | ls | call`, as a user types them, with functions, classes and MCP servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace.tools.mcp import McpServer
from tailrace_cli.cluster.servers import (
    NATS_URL,
    REDIS_URL,
    Credentials,
    nats_command,
    redis_command,
    servers_of,
)
from tailrace_cli.commands.tools import app
from tailrace_cli.config import ClusterConfig
from tests.world.servers import ServerProcess, free_port, wait_for_port

EXAMPLES = Path(__file__).parents[3] / "examples" / "tools"
TAILRACE = [sys.executable, "-m", "tailrace_cli", "tools"]
SERVED = ("my_tools:add", "my_tools:Notebook")


def environment(nats_url: str) -> dict[str, str]:
    return {**os.environ, "TAILRACE_NATS_URL": nats_url, "TAILRACE_LOG": "json"}


def run(nats_url: str, *arguments: str) -> Result:
    """The command in this very process: starting Python costs more than all else here."""
    return CliRunner().invoke(app, list(arguments), env={"TAILRACE_NATS_URL": nats_url})


@contextmanager
def serving(nats_url: str, *arguments: str, folder: Path = EXAMPLES) -> Iterator[subprocess.Popen[str]]:
    """`tailrace tools serve` until the end of the block, once it says that it serves."""
    process = subprocess.Popen(
        [*TAILRACE, "serve", *arguments],
        cwd=folder,
        env=environment(nats_url),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        deadline_s = time.monotonic() + 240
        while not any('"tools served"' in line for line in lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
            assert time.monotonic() < deadline_s, lines
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(nats_server: ServerProcess) -> Iterator[str]:
    with serving(nats_server.url, *SERVED, "--run", "cli_run"):
        yield nats_server.url


def test_call_prints_what_the_tool_returns(served: str) -> None:
    result = run(served, "call", "add", '{"a": 2, "b": 3.5}', "--run", "cli_run")
    assert (result.exit_code, result.stdout) == (0, "5.5\n"), result.output


def test_call_of_wrong_arguments_says_what_is_wrong_and_exits_1(served: str) -> None:
    result = run(served, "call", "add", '{"a": "two", "b": 1}', "--run", "cli_run")
    assert result.exit_code == 1
    assert "Expected `float`, got `str` - at `a`" in result.stderr


def test_ls_shows_schema_workers_and_load(served: str) -> None:
    deadline_s = time.monotonic() + 60
    while True:  # a worker on a busy machine may answer after `ls` has printed
        text = run(served, "ls").stdout
        lines = [json.loads(line) for line in run(served, "ls", "--json").stdout.splitlines()]
        tools = {tool["name"]: tool for tool in lines if tool["subject"].startswith("cli_run.")}
        is_whole = "add" in tools and "num_running" in tools["add"]["workers"][0] and "add" in text
        if is_whole or time.monotonic() > deadline_s:
            break
    assert "add  (cli_run.tool.add)" in text
    assert "Add two numbers." in text
    assert set(tools) == {"add", "notebook"}
    assert tools["add"]["parameters"]["properties"]["a"] == {
        "type": "number",
        "description": "the first number",
    }
    (worker,) = tools["add"]["workers"]
    assert (worker["num_running"], worker["max_concurrency"]) == (0, 64)


def test_call_of_a_tool_that_nobody_serves_says_so_and_exits_1(served: str) -> None:
    result = run(served, "call", "missing")
    assert result.exit_code == 1
    assert "no worker listens on 'tool.missing'" in result.stderr


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("my_tools:nothing", "module 'my_tools' has no 'nothing'"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("asyncio:sleep", "is no tool: mark a function with @tool"),
    ],
)
def test_serving_what_is_no_tool_is_a_user_s_mistake(
    nats_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, argument: str, words: str
) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    result = run(nats_server.url, "serve", argument)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_sigterm_drains_the_worker_and_exits_0(nats_server: ServerProcess) -> None:
    with serving(nats_server.url, "my_tools:add", "--run", "drained") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_the_tools_of_an_mcp_server_by_stdio_are_served(nats_server: ServerProcess) -> None:
    command = f"{sys.executable} mcp_server.py"
    with serving(nats_server.url, "--mcp", command, "--run", "mcp_stdio"):
        check_mcp(nats_server.url, "mcp_stdio")


def test_the_tools_of_an_mcp_server_by_http_are_served(nats_server: ServerProcess) -> None:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "mcp_server.py", str(port)],
        cwd=EXAMPLES,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, server, 60.0)
        url = f"http://127.0.0.1:{port}/mcp"
        with serving(nats_server.url, "--mcp-url", url, "--run", "mcp_http"):
            check_mcp(nats_server.url, "mcp_http")
            server.kill()
            server.wait()
            lost = run(nats_server.url, "call", "count_words", '{"text": "a"}', "--run", "mcp_http")
            assert lost.exit_code == 1
            assert "count_words is not available: MCP server" in lost.stderr
    finally:
        server.kill()
        server.wait()


def check_mcp(nats_url: str, run_name: str) -> None:
    counted = run(nats_url, "call", "count_words", '{"text": "one two three"}', "--run", run_name)
    assert (counted.exit_code, counted.stdout) == (0, "3\n"), counted.output
    divided = run(nats_url, "call", "divide", '{"a": 1, "b": 0}', "--run", run_name)
    assert divided.exit_code == 1
    assert "division by zero" in divided.stderr
    wrong = run(nats_url, "call", "divide", '{"a": "one", "b": 2}', "--run", run_name)
    assert "'one' is not of type 'number' - at `a`" in wrong.stderr


def test_a_command_of_an_mcp_server_that_is_not_there_is_refused_at_once() -> None:
    refused = run("nats://127.0.0.1:9", "serve", "--mcp", "/no/such server.py")
    told = "MCP server /no/such server.py: there is no program '/no/such': correct the command"
    assert str(refused.exception) == told


async def test_an_mcp_server_that_does_not_exist_is_a_user_s_mistake() -> None:
    server = McpServer("/no/such/program")
    connecting = asyncio.create_task(server.run())
    with pytest.raises(ConfigError, match=r"/no/such/program: not reached within 0\.5 s"):
        await server.offers(0.5)
    connecting.cancel()
    await asyncio.wait({connecting})


def test_a_run_directory_names_servers_and_credentials(
    guarded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = ("my_tools:add", "--run-dir", str(guarded_run))
    with serving("nats://127.0.0.1:1", *tool):
        deadline_s = time.monotonic() + 60
        while True:  # a busy worker may answer too late for one list
            result = run("nats://127.0.0.1:1", "ls", "--run-dir", str(guarded_run))
            if result.stdout.startswith("add  ("):
                break
            assert time.monotonic() < deadline_s, result.output
        assert "tailrace.run" not in result.stdout
        argv = ("call", "add", '{"a": 2, "b": 3.5}', "--run-dir", str(guarded_run))
        assert run("nats://127.0.0.1:1", *argv).stdout == "5.5\n"
        monkeypatch.chdir(guarded_run)
        assert run("nats://127.0.0.1:1", *argv[:-1], ".").stdout == "5.5\n"


def test_a_run_directory_carries_results_that_are_too_large_for_a_message(
    guarded_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "large_tools.py").write_text(
        "from tailrace import tool\n@tool\ndef large(n: int) -> str:\n    'Long.'\n    return 'x' * n\n"
    )
    with serving("", "large_tools:large", "--run-dir", str(guarded_run), folder=tmp_path):
        argv = ("call", "large", '{"n": 3000000}', "--run-dir", str(guarded_run))
        assert run("", *argv).stdout == "x" * 3_000_000 + "\n"


def test_no_nats_and_no_run_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for arguments in (("ls",), ("call", "add"), ("serve", "my_tools:add")):
        result = run(f"nats://127.0.0.1:{free_port()}", *arguments)
        assert isinstance(result.exception, ConfigError)
        assert "no NATS answers at" in str(result.exception)
        assert result.output == ""  # no log beside the error
    result = run("", "ls", "--run-dir", str(tmp_path))
    assert "no directory of a run that goes on" in str(result.exception)


def test_a_worker_of_a_run_waits_for_a_nats_that_starts_again(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [*TAILRACE, "serve", "my_tools:add"],
        cwd=EXAMPLES,
        env=environment(f"nats://127.0.0.1:{port}") | {"TAILRACE_READY_FILE": str(tmp_path / "ready")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        while "waiting for nats" not in (line := process.stderr.readline()):
            assert line, process.wait()
    finally:
        process.kill()
        process.wait()


def test_what_a_user_may_not_do_is_an_error(guarded_run: Path) -> None:
    servers = servers_of(guarded_run)
    url, password = servers.nats_url, servers.nats_passwords["learner"]
    arguments = ("ls", "--user", "learner", "--password", password)
    assert "may not do this" in str(run(url, *arguments).exception)
    serve = ("serve", "my_tools:add", "--user", "learner", "--password", password)
    options = {"cwd": EXAMPLES, "env": environment(url), "timeout": 240, "check": False}
    refused = subprocess.run([*TAILRACE, *serve], capture_output=True, text=True, **options)
    assert refused.returncode == 2
    assert "NATS does not let this user serve add" in refused.stdout + refused.stderr


def test_workers_of_one_tool_with_different_schemas_are_told(
    nats_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "newer_tools.py").write_text(
        "from tailrace import tool\n@tool\ndef add(a: int) -> int:\n    'One.'\n    return a\n"
    )
    with serving(nats_server.url, "my_tools:add"), serving(nats_server.url, "newer_tools:add"):
        deadline_s = time.monotonic() + 60
        while "2 different schemas" not in (shown := run(nats_server.url, "ls").stdout):
            assert time.monotonic() < deadline_s, (
                shown
            )  # a busy worker may answer too late for one list


@pytest.fixture(scope="module")
def guarded_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of a run with servers of its own, as the local cluster makes them."""
    run_dir = tmp_path_factory.mktemp("runs") / "guarded"
    state_dir = run_dir / "state"
    state_dir.mkdir(parents=True)
    keys, servers = Credentials.load_or_make(state_dir), []
    for name, command in ((NATS_URL, nats_command), (REDIS_URL, redis_command)):
        port = free_port()
        url = f"{name.partition('_')[0]}://127.0.0.1:{port}"
        (state_dir / name).write_text(url)
        argv = command(ClusterConfig(), state_dir, port, "guarded", keys)
        servers.append(ServerProcess(argv, port, url))
        servers[-1].start()
    yield run_dir
    for server in servers:
        server.kill()
