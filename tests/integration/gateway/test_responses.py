"""Responses with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.world.byte_model import call_text
from tests.world.gateway import GatewayWorld

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def say(prompt: str, _: object) -> str:
    if "18 degrees" in prompt:
        return "Sunny."
    return "<think>Hm.</think>Let me see." + call_text("weather", city="Rome")


async def test_items_of_a_reply_come_back_as_one_message(world: GatewayWorld) -> None:
    world.model.reply = say
    client = world.openai(await world.open())
    first = await client.responses.create(
        model="m", input="Weather?", instructions="Be brief.", tools=[WEATHER]
    )
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert first.output_text == "Let me see."
    call: Any = first.output[2]
    items: Any = [
        {"role": "user", "content": "Weather?"},
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"},
    ]
    second = await client.responses.create(
        model="m", input=items, instructions="Be brief.", tools=[WEATHER]
    )
    assert second.output_text == "Sunny."
    assert second.status == "completed"
    export = await world.export()
    assert export.metrics["num_forks"] == 0
    assert "Be brief." in world.model.prompt(0)


async def test_a_response_is_continued_by_its_id(world: GatewayWorld) -> None:
    world.model.reply = say
    client = world.openai(await world.open())
    first = await client.responses.create(model="m", input="Weather?", tools=[WEATHER])
    call: Any = first.output[-1]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}]
    second = await client.responses.create(
        model="m", input=output, previous_response_id=first.id, tools=[WEATHER]
    )
    assert second.output_text == "Sunny."
    assert second.previous_response_id == first.id
    assert (await world.export()).metrics["num_forks"] == 0


async def test_the_stream_builds_the_same_response(world: GatewayWorld) -> None:
    world.model.chunk = 3
    world.model.reply = say
    client = world.openai(await world.open())
    stream: Any = await client.responses.create(
        model="m", input="Weather?", tools=[WEATHER], stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert ("".join(texts), "".join(thoughts)) == ("Let me see.", "Hm.")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response.output
    assert [item.type for item in done] == [item.type for item in final]
    assert [item.id for item in done] == [item.id for item in final]
    assert done[-1].arguments == final[-1].arguments


@pytest.mark.parametrize("helps", [False, True])
async def test_a_stream_that_fails_late_raises_in_the_client(
    empty_world: GatewayWorld, helps: bool
) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise="refuse")
    client = world.openai(await world.open(), max_retries=0)
    settings: Any = {"model": "m", "input": "Hi", "text": {"format": {"type": "json_object"}}}

    async def read() -> None:
        if helps:
            async with client.responses.stream(**settings) as stream:
                await stream.get_final_response()
        else:
            _ = [event async for event in await client.responses.create(stream=True, **settings)]

    with pytest.raises(openai.APIError, match="not valid JSON") as raised:
        await read()
    assert raised.value.code == "response_format_not_met"


async def test_a_cut_response_is_incomplete(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    answer = await client.responses.create(model="m", input="Hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_an_unknown_response_is_not_found(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        await client.responses.create(model="m", input="Hi", previous_response_id="nobody")
