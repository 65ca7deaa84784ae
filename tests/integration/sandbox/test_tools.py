"""The three tools as an episode calls them, over real confined processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tailrace.tools.host import LocalTools
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import ToolResult
from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.adapters.tools import offers
from tailrace_sandbox.config import SandboxConfig

Call = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    config = SandboxConfig()
    runner = Runner(await prepare(config))
    tools = LocalTools(offers(runner, config))
    async with tools.session("episode", ["python", "shell", "python_session"]) as episode:
        numbers = iter(range(1000))

        async def call_one(name: str, **arguments: Any) -> ToolResult:
            return await episode.call(ToolCall(f"call{next(numbers)}", name, json.dumps(arguments)))

        yield call_one
    await tools.close()
    await runner.close()


async def test_python_returns_what_the_program_prints(call: Call) -> None:
    result = await call("python", code="print(input())", stdin="hello")
    assert (result.content, result.is_error) == ("hello", False)


async def test_shell_says_the_exit_code_of_a_failure(call: Call) -> None:
    result = await call("shell", command="echo $((3 * 4)); exit 3")
    assert (result.content, result.is_error) == ("12\n[exit code 3]", True)


async def test_files_go_in_and_come_out(call: Call) -> None:
    code = "open('out.txt', 'w').write(open('in/a').read().upper())"
    result = await call("python", code=code, files={"in/a": "hey"}, outputs=["*.txt", "none"])
    assert json.loads(result.content)["files"] == {"out.txt": "HEY"}


async def test_bytes_go_in_and_come_out_in_base64(call: Call) -> None:
    code = "open('out', 'wb').write(open('in', 'rb').read() * 2)"
    result = await call("python", code=code, files={"in": {"base64": "/wA="}}, outputs=["out"])
    assert json.loads(result.content)["files"] == {"out": {"base64": "/wD/AA=="}}


async def test_shell_and_python_have_the_same_interpreter(call: Call) -> None:
    shell = await call("shell", command="python3 -c 'import sys; print(sys.prefix, sys.version)'")
    python = await call("python", code="import sys; print(sys.prefix, sys.version)")
    assert shell.content == python.content


async def test_links_to_files_outside_are_not_handed_out(call: Call) -> None:
    result = await call("python", code="import os; os.symlink('/etc/shadow', 'l')", outputs=["l"])
    content = json.loads(result.content)
    assert (content["files"], content["refused_files"]) == ({}, ["l"])


async def test_a_session_keeps_names_also_over_a_time_out(call: Call) -> None:
    await call("python_session", code="x = 5")
    assert (await call("python_session", code="x * x")).content == "25"
    spun = await call("python_session", code="while True: pass", timeout_s=1)
    assert "KeyboardInterrupt" in spun.content
    assert (await call("python_session", code="x + 1")).content == "6"


async def test_a_session_that_exits_begins_anew(call: Call) -> None:
    await call("python_session", code="x = 5")
    ended = await call("python_session", code="import os; os._exit(4)")
    assert ended.content.startswith("[exit code 4]\n[the session is over")
    assert "NameError" in (await call("python_session", code="x")).content
