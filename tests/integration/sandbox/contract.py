"""Behaviour that every backend of the sandbox has, through the tools that models call."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tailrace.tools.host import LocalTools
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import ToolErrorKind, ToolResult
from tailrace_sandbox.adapters.tools import offers
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Sandbox

Call = Callable[..., Awaitable[ToolResult]]
TOOLS = ["python", "shell", "python_session"]


@asynccontextmanager
async def calling(
    sandbox: Sandbox, config: SandboxConfig, create_kwargs: dict[str, Any] | None = None
) -> AsyncIterator[Call]:
    """A function that calls a tool by name, as an episode does."""
    tools = LocalTools(offers(sandbox, config))
    by_tool = dict.fromkeys(TOOLS, create_kwargs) if create_kwargs else None
    async with tools.session("episode", TOOLS, create_kwargs=by_tool) as episode:
        numbers = iter(range(1000))

        async def call(name: str, give_up_s: float | None = None, **arguments: Any) -> ToolResult:
            asked = ToolCall(f"call{next(numbers)}", name, json.dumps(arguments))
            return await episode.call(asked, give_up_s)

        yield call
    await tools.close()


class ToolsContract:
    """Tests that hold for every backend; a subclass has a fixture `call`."""

    async def test_python_returns_what_the_program_prints(self, call: Call) -> None:
        result = await call("python", code="print(input())", stdin="hello")
        assert (result.content, result.is_error) == ("hello", False)

    async def test_an_exception_shows_the_line_of_the_program(self, call: Call) -> None:
        result = await call("python", code="x = 1\nprint('before')\nx / 0")
        assert result.content.startswith("before\nTraceback")
        assert "    x / 0" in result.content
        assert result.content.endswith("ZeroDivisionError: division by zero\n[exit code 1]")

    async def test_shell_says_the_exit_code_of_a_failure(self, call: Call) -> None:
        result = await call("shell", command="echo $((3 * 4)); exit 3")
        assert (result.content, result.is_error) == ("12\n[exit code 3]", True)

    async def test_a_command_line_that_no_shell_takes_is_told(self, call: Call) -> None:
        result = await call("shell", command="echo a\0b")
        assert result.is_error
        assert "it holds a null character" in result.content

    async def test_shell_quotes_nothing_away(self, call: Call) -> None:
        result = await call("shell", command='printf \'%s|\' "a b" \'$HOME\' \\"; echo "`echo c`"')
        assert result.content == 'a b|$HOME|"|c'

    async def test_files_go_in_and_come_out(self, call: Call) -> None:
        code = "open('out.txt', 'w').write(open('in/a').read().upper())"
        result = await call("python", code=code, files={"in/a": "hey"}, outputs=["*.txt", "none"])
        assert json.loads(result.content)["files"] == {"out.txt": "HEY"}

    async def test_bytes_go_in_and_come_out_in_base64(self, call: Call) -> None:
        code = "open('out', 'wb').write(open('in', 'rb').read() * 2)"
        result = await call("python", code=code, files={"in": {"base64": "/wA="}}, outputs=["out"])
        assert json.loads(result.content)["files"] == {"out": {"base64": "/wD/AA=="}}

    async def test_a_large_file_of_zeros_comes_out(self, call: Call) -> None:
        code = "open('out', 'wb').write(bytes(3 << 20))"
        result = await call("python", code=code, outputs=["out"])
        content = json.loads(result.content)["files"]["out"]["base64"]
        assert content == base64.b64encode(bytes(3 << 20)).decode()

    async def test_patterns_find_files_in_folders(self, call: Call) -> None:
        command = "mkdir -p a/b .c; echo 1 >a/b/x.txt; echo 2 >y.txt; echo 3 >.c/z.txt"
        result = await call("shell", command=command, outputs=["**/*.txt"])
        assert json.loads(result.content)["files"] == {"a/b/x.txt": "1\n", "y.txt": "2\n"}

    async def test_links_to_files_outside_are_not_handed_out(self, call: Call) -> None:
        code = "import os; os.symlink('/etc/hostname', 'l')"
        content = json.loads((await call("python", code=code, outputs=["l"])).content)
        assert (content["files"], content["refused_files"]) == ({}, ["l"])

    async def test_nothing_stays_from_call_to_call(self, call: Call) -> None:
        await call("python", code="open('left', 'w').close(); x = 1")
        code = "import os; print(os.path.exists('left'), 'x' in globals())"
        assert (await call("python", code=code)).content == "False False"

    async def test_a_program_that_does_not_end_is_ended_with_its_output_kept(self, call: Call) -> None:
        result = await call("python", code="print('begun')\nwhile True: pass", timeout_s=3)
        assert result.content.startswith("begun\n")
        assert "[ended because it took longer than 3 s]" in result.content

    async def test_a_survivor_that_keeps_the_output_open_does_not_hold_the_call(
        self, call: Call
    ) -> None:
        result = await call("shell", command="(sleep 30; echo late) & echo early", timeout_s=60)
        assert result.content == "early"

    async def test_output_without_an_end_is_cut(self, call: Call) -> None:
        result = await call("python", code="while True: print('x' * 1000)", timeout_s=60)
        assert "[output was cut]" in result.content
        assert len(result.content) < 10_000

    async def test_a_session_keeps_names_also_over_a_time_out(self, call: Call) -> None:
        await call("python_session", code="x = 5")
        assert (await call("python_session", code="x * x")).content == "25"
        spun = await call("python_session", code="while True: pass", timeout_s=1)
        assert "KeyboardInterrupt" in spun.content
        assert "[interrupted because it took longer than 1 s; variables are kept]" in spun.content
        assert (await call("python_session", code="x + 1")).content == "6"

    async def test_a_session_whose_call_was_given_up_is_lost_and_says_so(self, call: Call) -> None:
        """Its reply would otherwise pass for that of the next call."""
        await call("python_session", code="x = 5")
        slow = "import time; time.sleep(2); print('late')"
        assert (await call("python_session", 0.5, code=slow)).error_kind is ToolErrorKind.TIMEOUT
        assert "the session was lost" in (await call("python_session", code="x")).content
        assert (await call("python_session", code="print('x' in globals())")).content == "False"

    async def test_a_session_shows_errors_and_goes_on(self, call: Call) -> None:
        await call("python_session", code="x = 5")
        failed = await call("python_session", code="print(x)\nx / 0")
        assert failed.content.startswith("5\nTraceback")
        assert "ZeroDivisionError" in failed.content
        assert (await call("python_session", code="x")).content == "5"

    async def test_a_session_that_exits_begins_anew(self, call: Call) -> None:
        await call("python_session", code="x = 5; open('f', 'w').close()")
        ended = await call("python_session", code="import os; os._exit(4)")
        assert ended.content.startswith("[exit code 4]\n[the session is over")
        assert "NameError" in (await call("python_session", code="x")).content
        result = await call("python_session", code="import os; os.path.exists('f')")
        assert result.content == "False"

    async def test_a_session_that_exits_in_order_says_so_in_that_call(self, call: Call) -> None:
        code = "x = 5; open('f', 'w').close(); print('bye'); raise SystemExit(4)"
        ended = json.loads((await call("python_session", code=code, outputs=["f"])).content)
        assert (ended["stdout"], ended["exit_code"], ended["files"]) == ("bye\n", 4, {"f": ""})
        assert "the session is over" in ended["notes"][-1]
        assert (await call("python_session", code="print('x' in globals())")).content == "False"

    async def test_files_of_a_session_go_in_and_come_out(self, call: Call) -> None:
        put = await call("python_session", code="open('a').read()", files={"a": "first"})
        assert put.content == "'first'"
        got = await call("python_session", code="print(1)", outputs=["a"])
        assert json.loads(got.content)["files"] == {"a": "first"}

    async def test_a_file_in_the_place_of_a_folder_is_the_calls_mistake(self, call: Call) -> None:
        result = await call("python", code="print('ran')", files={"a": "x", "a/b": "y"})
        assert result.content.startswith("files: cannot write")
        assert not result.infra_error
