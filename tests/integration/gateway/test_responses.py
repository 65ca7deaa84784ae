"""Responses with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tailrace_protos.session import ExportStyle, SessionOpened
from tests.integration.gateway.replicas import other_url
from tests.world.byte_model import call_text
from tests.world.gateway import GatewayWorld

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}

TEXT_BEFORE = "<|channel|>commentary<|message|>Let me see.<|end|>"
THOUGHTS_BETWEEN = (
    f"{TEXT_BEFORE}<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
)


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
        {"role": "user", "content": "Weather?", "id": None},
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


@pytest.mark.parametrize("is_other", [False, True])
async def test_items_of_a_reply_may_come_back_by_their_ids(world: GatewayWorld, is_other: bool) -> None:
    world.model.reply = say
    opened = await world.open()
    client = world.openai(opened)
    settings: Any = {"model": "m", "instructions": "Be brief.", "tools": [WEATHER]}
    first = await client.responses.create(input="Weather?", **settings)
    if is_other:
        await world.start_gateway("gateway-1")
        url = await other_url(world, opened.base_url)
        client = world.openai(SessionOpened(opened.session_id, url, opened.api_key))
    call: Any = first.output[2]
    question = {"role": "user", "content": "Weather?"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    explicit = [*references[:2], call.model_dump()]  # as the AI SDK of Vercel sends them
    for items in (references, explicit):
        second = await client.responses.create(input=[question, *items, result], **settings)
        assert second.output_text == "Sunny."
    for name in ("msg_nobody", "fc_nobody", "x", ""):
        unknown = {"type": "item_reference", "id": name}
        with pytest.raises(openai.NotFoundError, match=r"input\[1\]\.id: no answer of this session"):
            await client.responses.create(input=[question, unknown, result], **settings)
    metrics = (await world.export()).metrics
    assert (metrics["num_calls"], metrics["num_forks"]) == (3, 0)


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


async def test_new_instructions_replace_the_system_message_and_new_items_stand_at_the_end(
    world: GatewayWorld,
) -> None:
    client = world.openai(await world.open())
    first = await client.responses.create(model="m", input="Hi", instructions="Be brief.")
    settings: Any = {"model": "m", "previous_response_id": first.id}
    item: Any = {"role": "developer", "content": "Be long."}
    await client.responses.create(input=[item, {"role": "user", "content": "More"}], **settings)
    prompt = world.model.prompt()
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    assert prompt.index("Hello there.") < prompt.index("Be long.") < prompt.index("More")
    await client.responses.create(input="More", instructions="Be long.", **settings)
    prompt = world.model.prompt()
    assert prompt.startswith("<|im_start|>system\nBe long.")
    assert "Be brief." not in prompt


async def test_thoughts_between_two_texts_end_the_stream_as_one_message(
    empty_world: GatewayWorld,
) -> None:
    world = empty_world
    world.run_settings["chat"] = {"reasoning_parser": "harmony"}
    world.model.reply = lambda *_: THOUGHTS_BETWEEN
    world.model.hold, world.model.num_before_hold = True, len(TEXT_BEFORE)
    await world.start_gateway()
    client = world.openai(await world.open())
    done: list[Any] = []
    async with client.responses.stream(model="m", input="Hi") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                world.model.release()
            elif event.type == "response.output_item.done":
                done.append(event.item)
        final = await stream.get_final_response()
    assert [item.type for item in done] == ["message", "reasoning", "message"]
    assert len({item.id for item in done}) == 3
    assert final.output_text == "Let me see.\nYes."
    items: Any = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in done]]
    await client.responses.create(model="m", input=[*items, {"role": "user", "content": "More"}])
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


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_of_thoughts_alone_is_continued_without_them(
    world: GatewayWorld, streams: bool, keeps_reasoning: bool
) -> None:
    world.model.reply = lambda prompt, _: "Fine." if "More" in prompt else "<think>Hm.</think>"
    client = world.openai(await world.open())
    question: Any = {"role": "user", "content": "Hi"}
    if streams:
        stream = await client.responses.create(model="m", input=[question], stream=True)
        events = [event async for event in stream]
        items = [event.item for event in events if event.type == "response.output_item.done"]
        completed: Any = events[-1]
        assert items == completed.response.output
    else:
        items = (await client.responses.create(model="m", input=[question])).output
    assert [item.type for item in items] == ["reasoning", "message"]
    kept: Any = [item.model_dump() for item in items if keeps_reasoning or item.type == "message"]
    more: Any = {"role": "user", "content": "More"}
    await client.responses.create(model="m", input=[question, *kept, more])
    assert "<think>Hm.</think><|im_end|>" in world.model.prompt()
    export = await world.export(style=ExportStyle.CONCAT)
    assert (len(export.rows), export.metrics["num_forks"]) == (1, 0)
