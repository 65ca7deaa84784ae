"""Tools in this very process: the same sessions, limits and errors, without NATS."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

from tailrace.sdk.tool import Tool, ToolOutput, ToolSession, tool
from tailrace.tools import LocalTools, ToolErrorKind, ToolsMissingError
from tailrace_protos.base import decode_json, encode_json
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import ToolResult


@tool
def block(barrier_s: float) -> str:
    """Block the thread."""
    time.sleep(barrier_s)
    return "done"


class Memory(Tool):
    name = "memory"
    log: list[str] = []  # noqa: RUF012

    async def create(self, session: ToolSession) -> None:
        self.items: list[str] = []
        self.log.append(f"create {session.episode_id}")

    async def execute(self, arguments: dict[str, Any]) -> str:
        self.items.append(arguments["item"])
        return ",".join(self.items)

    async def release(self) -> None:
        self.log.append("release")
        raise RuntimeError("a release that fails harms nobody else")


async def test_state_lives_as_long_as_the_episode() -> None:
    Memory.log.clear()
    tools = LocalTools([Memory])
    async with tools.session("e1", ["memory"]) as episode:
        for item, expected in (("a", "a"), ("b", "a,b")):
            result = await episode.call(ToolCall("c", "memory", f'{{"item": "{item}"}}'))
            assert result.content == expected
        other = tools.session("e2", ["memory"])
        assert (await other.call(ToolCall("c", "memory", '{"item": "z"}'))).content == "z"
        await other.release()
        await other.release()
    assert Memory.log == ["create e1", "create e2", "release", "release"]


class Slow(Memory):
    """Its release takes until `may_end`."""

    name = "slow"
    began: ClassVar[asyncio.Event]
    may_end: ClassVar[asyncio.Event]

    async def release(self) -> None:
        self.began.set()
        await self.may_end.wait()
        self.log.append("release")


async def test_a_release_ends_although_its_caller_goes_and_the_tools_close() -> None:
    Memory.log.clear()
    Slow.began, Slow.may_end = asyncio.Event(), asyncio.Event()
    tools = LocalTools([Slow])
    episode = tools.session("e1", ["slow"])
    await episode.call(ToolCall("c", "slow", '{"item": "a"}'))
    releasing = asyncio.create_task(episode.release())
    await Slow.began.wait()
    releasing.cancel()
    await asyncio.wait({releasing})
    closing = asyncio.create_task(tools.close())
    asyncio.get_running_loop().call_soon(Slow.may_end.set)
    await closing
    assert Memory.log == ["create e1", "release"]


async def test_functions_that_block_run_beside_each_other() -> None:
    meeting = threading.Barrier(32)

    @tool
    def meet() -> str:
        meeting.wait(60)
        return "met"

    tools = LocalTools([meet])
    sessions = [tools.session(f"e{n}", ["meet"]) for n in range(32)]
    results = await asyncio.gather(*(s.call(ToolCall("c", "meet", "{}")) for s in sessions))
    assert {result.content for result in results} == {"met"}


OUTPUTS: list[tuple[Any, str]] = [
    (ToolOutput(5), "content must be text, found int"),  # type: ignore[arg-type]
    (ToolOutput("x", metrics={"loss": float("nan")}), "metrics must be finite numbers"),
    (ToolOutput("x", metrics={"hits": "3"}), "metrics must be finite numbers"),  # type: ignore[dict-item]
    (object(), "cannot be sent"),
]


@pytest.mark.parametrize(("output", "words"), OUTPUTS)
async def test_an_output_that_cannot_be_sent_is_an_error_of_the_tool(output: Any, words: str) -> None:
    @tool
    def broken() -> Any:
        return output

    async with LocalTools([broken]).session("e", ["broken"]) as tools:
        result = await tools.call(ToolCall("c", "broken", "{}"))
    assert result.error_kind is ToolErrorKind.RAISED
    assert words in result.content


async def test_numbers_of_numpy_are_metrics_of_a_tool() -> None:
    @tool
    def counted() -> ToolOutput:
        return ToolOutput("x", metrics={"hits": np.float32(2), "found": np.bool_(True)})  # type: ignore[dict-item]

    async with LocalTools([counted]).session("e", ["counted"]) as tools:
        result = await tools.call(ToolCall("c", "counted", "{}"))
    assert decode_json(encode_json(result), ToolResult).metrics == {"hits": 2.0, "found": 1.0}


@pytest.mark.parametrize(
    ("reference", "arguments", "is_infra"),
    [("#/$defs/nothing", '{"x": 1}', True), ("#", '{"x": ' * 400 + "{}" + "}" * 400, False)],
)
async def test_arguments_that_no_schema_can_check_end_the_call(
    reference: str, arguments: str, is_infra: bool
) -> None:
    class Strange(Tool):
        name = "strange"
        parameters: ClassVar[dict[str, Any]] = {
            "type": "object",
            "properties": {"x": {"$ref": reference}},
        }

        async def execute(self, arguments: dict[str, Any]) -> str:
            return "fine"

    async with LocalTools([Strange]).session("e", ["strange"]) as tools:
        result = await tools.call(ToolCall("c", "strange", arguments))
    assert ("a reference to nothing" in result.infra_error) is is_infra
    assert ("nested too deeply" in result.content) is not is_infra


async def test_a_tool_that_is_not_there_is_named_with_those_that_are() -> None:
    tools = LocalTools([block])
    with pytest.raises(ToolsMissingError, match=r"no worker serves blok .*; block is served"):
        await tools.schemas(["blok"])
    result = await tools.session("e", ["block"]).call(ToolCall("c", "blok", "{}"))
    assert result.error_kind is ToolErrorKind.UNKNOWN_TOOL


async def test_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        LocalTools([block, block])
