"""Programs in replies, tested by the real sandbox: honest, wrong, endless and cheating ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.tools import ToolClient
from tailrace.tools.host import LocalTools
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_protos.tool import CallTool, ToolResult
from tailrace_reward.adapters.scorers import SandboxTests
from tailrace_reward.ports import ComponentFailedError
from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.adapters.tools import offers
from tailrace_sandbox.config import SandboxConfig
from tests.integration.sandbox.cluster import Cluster

IO = {"tests": {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}}
ASSERTS = {"test_list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
SUM = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture
async def tools() -> AsyncIterator[LocalTools]:
    config = SandboxConfig()
    runner = Runner(await prepare(config))
    local = LocalTools(offers(runner, config))
    yield local
    await local.close()
    await runner.close()


def item(program: str, row: dict[str, Any]) -> ScoreItem:
    messages = (ChatMessage("assistant", f"Here:\n```python\n{program}\n```"),)
    return ScoreItem("g0.0", EnvTask("set", 0, 0, row), messages, (), {})


async def test_programs_get_what_their_tests_say(tools: LocalTools) -> None:
    scorer = SandboxTests(tools, timeout_s=6.0)
    add = "def add(a, b):\n    return a + b"
    cases = [
        (SUM, IO, 1.0),
        ("print(3)", IO, 0.0),
        ("import math\nprint(math.", IO, 0.0),
        ("while True: pass", {"tests": {"inputs": ["1 2"], "outputs": ["3"]}}, 0.0),
        ("print(3)\nraise SystemExit(1)", {"tests": {"inputs": ["1 2"], "outputs": ["3"]}}, 0.0),
        (add, ASSERTS, 1.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", ASSERTS, 0.0),
    ]
    for program, row, wanted in cases:
        assert await scorer.score(item(program, row)) == wanted, program
    with pytest.raises(ComponentFailedError, match="no true answer"):
        await scorer.score(item(SUM, {"prompt": "?"}))


async def test_a_right_output_that_the_sandbox_cuts_is_no_zero(tools: LocalTools) -> None:
    scorer = SandboxTests(tools)
    text = {"tests": {"inputs": ["100000"], "outputs": ["x" * 100_000]}}
    result = {"tests": {"fn_name": "f", "inputs": [[30_000]], "outputs": [[1] * 30_000]}}
    for program, row in (
        ("print('x' * int(input()))", text),
        ("def f(n):\n    return [1] * n", result),
    ):
        with pytest.raises(ComponentFailedError, match=r"raise sandbox\.limits\.max_output_bytes"):
            await scorer.score(item(program, row))
    assert await scorer.score(item("print('x')", text)) == 0.0
    assert await scorer.score(item("print('x' * 100000)", IO)) == 0.0  # it says too much


async def test_no_file_of_a_program_keeps_it_from_its_verdict(tools: LocalTools) -> None:
    asked: list[str] = []

    class Asked(LocalTools):
        async def run_call(self, request: CallTool) -> ToolResult:
            asked.extend(request.arguments["outputs"])
            return await tools.run_call(request)

    scorer = SandboxTests(Asked([]))
    assert await scorer.score(item(SUM, IO)) == 1.0
    large = f"for name in {sorted(set(asked))}:\n    if name: open(name, 'wb').write(bytes(8 << 20))\n"
    large += "open('no file', 'wb').write(bytes(8 << 20))\n"
    assert await scorer.score(item(large + SUM, IO)) == 1.0


async def test_the_share_of_passed_tests_counts_if_asked_for(tools: LocalTools) -> None:
    scorer = SandboxTests(tools, partial=True)
    assert await scorer.score(item("print(3)", IO)) == pytest.approx(1 / 3)
    assert await SandboxTests(tools, max_tests=1).score(item("print(3)", IO)) == 1.0


async def test_the_reward_service_may_call_the_sandbox(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {})
    try:
        cluster.start(1)
        async with cluster.caller("reward") as client:
            assert await SandboxTests(client).score(item(SUM, IO)) == 1.0
            large = {"tests": {"inputs": ["x" * (9 << 20)], "outputs": [str(9 << 20)]}}
            scorer = SandboxTests(ToolClient(client._port.bus, client.run))  # as in the service
            with pytest.raises(ComponentFailedError, match=r"arguments have .* bytes, at most"):
                await scorer.score(item("print(len(input()))", large))
    finally:
        cluster.close()
