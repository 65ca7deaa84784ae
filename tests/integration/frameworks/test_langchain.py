"""`ChatTailrace` as LangChain's users know chat models: calls, streams, tools, usage, structure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from tailrace.sdk.langchain import ChatTailrace
from tests.world.byte_model import call_text
from tests.world.workflows import WorkflowWorld


@tool
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


async def model_of(world: WorkflowWorld, **settings: Any) -> ChatTailrace:
    await world.gateway.start_gateway()
    opened = await world.gateway.open()
    return ChatTailrace(base_url=opened.base_url, api_key=opened.api_key, **settings)


async def test_a_call_gives_text_usage_and_the_completions_id(world: WorkflowWorld) -> None:
    model = await model_of(world)
    answer = await model.ainvoke("Hi")
    assert answer.text == "Hello there."
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(world.sampled()[0])
    assert answer.response_metadata["finish_reason"] == "stop"
    export = await world.gateway.export(rewards={str(answer.id): 0.5})
    assert export.rewards == (0.5,)


async def test_plain_calls_and_streams_work_from_threads(world: WorkflowWorld) -> None:
    model = await model_of(world)
    assert (await asyncio.to_thread(model.invoke, "Hi")).text == "Hello there."
    parts = await asyncio.to_thread(lambda: list(model.stream("Hi")))
    assert "".join(part.text for part in parts) == "Hello there."


async def test_a_stream_comes_while_the_model_still_samples_and_adds_up_with_usage(
    world: WorkflowWorld,
) -> None:
    world.model.hold, world.model.num_before_hold = True, 5
    model = await model_of(world)
    whole: AIMessageChunk | None = None
    async for part in model.astream("Hi"):
        assert isinstance(part, AIMessageChunk)
        whole = part if whole is None else whole + part
        if whole.text == "Hello":
            world.model.release()
    assert whole is not None
    assert whole.text == "Hello there."
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(world.sampled()[0])
    assert whole.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_calls_come_back_in_later_calls_without_a_fork(
    world: WorkflowWorld, streams: bool
) -> None:
    world.model.reply = lambda prompt, request: (
        "42" if "<tool_response>" in prompt else f"Let me see. {call_text('double', number=21)}"
    )
    bound = (await model_of(world)).bind_tools([double])
    asked: list[Any] = [HumanMessage("Twice 21?")]
    if streams:
        parts = [part async for part in bound.astream(asked)]
        first: AIMessage = parts[0]
        for part in parts[1:]:
            first = first + part  # type: ignore[operator,assignment]
    else:
        first = await bound.ainvoke(asked)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("double", {"number": 21})]
    result = ToolMessage("42", tool_call_id=first.tool_calls[0]["id"])
    last = await bound.ainvoke([*asked, first, result])
    assert last.text == "42"
    assert (await world.gateway.export()).metrics["num_forks"] == 0


async def test_settings_and_stops_reach_the_engine(world: WorkflowWorld) -> None:
    model = await model_of(world, temperature=0.25, max_tokens=7, seed=3, stop=["lo"])
    answer = await model.ainvoke("Hi")
    (request,) = world.model.requests
    assert request.sampling.temperature == 0.25
    assert request.max_new_tokens == 7
    assert request.sampling.seed is not None
    assert answer.text == "Hel"
    await model.ainvoke("Hi", max_tokens=3)
    assert world.model.requests[1].max_new_tokens == 3


async def test_structured_output_uses_a_tool(world: WorkflowWorld) -> None:
    class Answer(BaseModel):
        """An answer."""

        number: int

    world.model.reply = lambda prompt, request: call_text("Answer", number=4)
    structured = (await model_of(world)).with_structured_output(Answer)
    assert await structured.ainvoke("Hi") == Answer(number=4)
