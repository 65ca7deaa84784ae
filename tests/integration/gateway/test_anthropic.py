"""Messages with Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.integration.gateway.test_responses import TEXT_BEFORE, THOUGHTS_BETWEEN
from tests.world.byte_model import call_text
from tests.world.gateway import GatewayWorld

WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "Weather?"}


def say(prompt: str, _: object) -> str:
    if "18 degrees" in prompt:
        return "Sunny."
    return "<think>Hm.</think>Let me see." + call_text("weather", city="Rome")


async def ask(client: anthropic.AsyncAnthropic, *messages: Any, **settings: Any) -> Any:
    settings = {"max_tokens": 500, "system": "Be brief.", "tools": [WEATHER], **settings}
    return await client.messages.create(model="m", messages=list(messages), **settings)


async def test_blocks_of_a_reply_come_back_as_one_message(world: GatewayWorld) -> None:
    world.model.reply = say
    client = world.anthropic(await world.open())
    first = await ask(client, USER)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[0].thinking) == ("tool_use", "Hm.")
    assert first.content[2].input == {"city": "Rome"}
    reply = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    result = {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": first.content[2].id,
                "content": [{"type": "text", "text": "18 degrees"}],
            }
        ],
    }
    second = await ask(client, USER, reply, result)
    assert second.content[0].text == "Sunny."
    assert second.stop_reason == "end_turn"
    assert (await world.export()).metrics["num_forks"] == 0
    assert "Be brief." in world.model.prompt(0)
    assert first.content[0].signature


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("no such city", "Error: no such city"),
        ([{"type": "text", "text": "Error 404"}], "Error 404"),
        (None, "Error"),
    ],
)
async def test_a_tools_error_reaches_the_model(world: GatewayWorld, content: Any, seen: str) -> None:
    world.model.reply = say
    client = world.anthropic(await world.open())
    first = await ask(client, USER)
    reply = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "is_error": True}
    told = result | ({} if content is None else {"content": content})
    await ask(client, USER, reply, {"role": "user", "content": [told]})
    assert f"<tool_response>{seen}</tool_response>" in world.model.prompt()


@pytest.mark.parametrize("content", [[], [{"type": "text", "text": ""}], ""])
async def test_a_message_may_be_empty(world: GatewayWorld, content: Any) -> None:
    client = world.anthropic(await world.open())
    answer = await ask(client, {"role": "user", "content": content}, system="")
    assert answer.content[0].text == "Hello there."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("rule", ["pass", "ask_again", "refuse"])
async def test_a_format_is_checked(empty_world: GatewayWorld, rule: str, streams: bool) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise=rule, max_asks=3)
    replies = ["No.", '{"x": 1}']
    world.model.reply = lambda *_: replies[len(world.model.requests) - 1]
    client = world.anthropic(await world.open())
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    settings: Any = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    async def text() -> str:
        if not streams:
            return str((await ask(client, USER, tools=[], **settings)).content[0].text)
        asked = {"model": "m", "messages": [USER], "max_tokens": 500, **settings}
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_text()

    if rule == "refuse":
        with pytest.raises(anthropic.APIStatusError, match="not valid JSON"):
            await text()
    else:
        assert await text() == {"pass": "No.", "ask_again": '{"x": 1}'}[rule]
    assert (await world.export()).metrics["num_broken_constraints"] == 1


@pytest.mark.parametrize("nests", [False, True])
async def test_pictures_are_refused_by_their_place(world: GatewayWorld, nests: bool) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    picture: dict[str, Any] = {"type": "image", "source": source}
    place = r"messages\[0\]\.content\[0\]"
    if nests:
        picture = {"type": "tool_result", "tool_use_id": "t", "content": [picture]}
        place += r"\.content\[0\]"
    client = world.anthropic(await world.open())
    with pytest.raises(anthropic.BadRequestError, match=rf"{place}: .*'image'"):
        await ask(client, {"role": "user", "content": [picture]})


async def test_the_stream_builds_the_same_message(world: GatewayWorld) -> None:
    world.model.chunk = 3
    world.model.reply = say
    client = world.anthropic(await world.open())
    async with client.messages.stream(
        model="m", messages=[USER], max_tokens=500, tools=[WEATHER]
    ) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    text: Any = final.content[1]
    call: Any = final.content[2]
    assert text.text == "Let me see."
    assert call.input == {"city": "Rome"}
    thought: Any = final.content[0]
    whole = await ask(client, USER)
    assert thought.signature == whole.content[0].signature != ""
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_sequence_is_named(world: GatewayWorld, streams: bool) -> None:
    world.model.reply = lambda *_: "One STOP two"
    client = world.anthropic(await world.open())
    settings: dict[str, Any] = {
        "model": "m",
        "messages": [USER],
        "max_tokens": 50,
        "stop_sequences": ["STOP"],
    }
    if streams:
        async with client.messages.stream(**settings) as stream:
            message: Any = await stream.get_final_message()
    else:
        message = await client.messages.create(**settings)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text.strip() == "One"


async def test_thoughts_can_be_left_out(world: GatewayWorld) -> None:
    world.model.reply = lambda *_: "<think>Hm.</think>Yes."
    client = world.anthropic(await world.open())
    answer = await ask(client, USER, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]


async def test_tokens_are_counted_as_they_would_be_sent(world: GatewayWorld) -> None:
    client = world.anthropic(await world.open())
    counted = await client.messages.count_tokens(model="m", messages=[USER])
    await client.messages.create(model="m", messages=[USER], max_tokens=9)
    assert counted.input_tokens == len(world.model.requests[0].prompt_ids) // 4


async def test_a_conversation_that_ends_with_a_reply_is_counted_but_not_continued(
    world: GatewayWorld,
) -> None:
    client = world.anthropic(await world.open())
    settings: Any = {"model": "m", "messages": [USER]}
    first = await client.messages.create(max_tokens=50, **settings)
    reply = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    settings["messages"] = [USER, reply]
    counted = await client.messages.count_tokens(**settings)
    prompt_after = len("\n<|im_start|>assistant\n")
    whole = first.usage.input_tokens + first.usage.output_tokens
    assert whole <= counted.input_tokens <= whole + prompt_after
    with pytest.raises(anthropic.BadRequestError, match="does not continue a reply"):
        await client.messages.create(max_tokens=50, **settings)


async def test_thoughts_between_two_texts_come_back_as_they_were(empty_world: GatewayWorld) -> None:
    world = empty_world
    world.run_settings["chat"] = {"reasoning_parser": "harmony"}
    world.model.reply = lambda *_: THOUGHTS_BETWEEN
    world.model.hold, world.model.num_before_hold = True, len(TEXT_BEFORE)
    await world.start_gateway()
    client = world.anthropic(await world.open())
    settings: Any = {"model": "m", "messages": [USER], "max_tokens": 500}
    async with client.messages.stream(**settings) as stream:
        async for event in stream:
            if event.type == "text":
                world.model.release()
        blocks = [block.model_dump() for block in (await stream.get_final_message()).content]
    assert [block["type"] for block in blocks] == ["text", "thinking", "text"]
    reply = {"role": "assistant", "content": blocks}
    await client.messages.create(**{**settings, "messages": [USER, reply, USER]})
    assert (await world.export()).metrics["num_forks"] == 0


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
async def test_context_management_that_keeps_all_thoughts_changes_nothing(
    world: GatewayWorld, keep: Any
) -> None:
    client = world.anthropic(await world.open())
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]  # as Claude Code sends it
    answer = await ask(client, USER, extra_body={"context_management": {"edits": edits}})
    assert answer.content[0].text == "Hello there."


@anthropic.beta_async_tool
async def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Its name.
    """
    return f"18 degrees in {city}"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_of_the_client_goes_on_without_a_thread(
    world: GatewayWorld, stream: bool
) -> None:
    world.model.reply = say
    client = world.anthropic(await world.open())
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=500, messages=[USER], tools=[weather], stream=stream
    )
    last: Any = await runner.until_done()
    assert last.content[0].text == "Sunny."
    metrics = (await world.export()).metrics
    assert (metrics["num_calls"], metrics["num_forks"]) == (2, 0)


async def test_a_system_message_may_stand_between_others(world: GatewayWorld) -> None:
    client = world.anthropic(await world.open())
    reply = {"role": "assistant", "content": (await ask(client, USER)).content[0].text}
    later = {"role": "system", "content": [{"type": "text", "text": "Be long."}]}
    await ask(client, USER, reply, later, USER)
    assert world.model.prompt().index("Hello there.") < world.model.prompt().index("Be long.")
    assert (await world.export()).metrics["num_forks"] == 0


async def test_thoughts_that_only_anthropic_can_read_are_left_out(world: GatewayWorld) -> None:
    client = world.anthropic(await world.open())
    first = (await ask(client, USER)).content[0].model_dump()
    hidden = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    await ask(client, USER, {"role": "assistant", "content": [hidden, first]}, USER)
    assert "c2VjcmV0" not in world.model.prompt()
    assert (await world.export()).metrics["num_forks"] == 0


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("user", {"type": "tool_result", "content": "1"}, "tool_use_id"),
        ("assistant", {"type": "tool_use", "name": "weather", "input": {}}, "id"),
        ("assistant", {"type": "tool_use", "id": "a", "input": {}}, "name"),
        ("user", {"type": "text"}, "text"),
    ],
)
async def test_a_block_without_its_field_is_refused(
    world: GatewayWorld, role: str, block: dict[str, Any], param: str
) -> None:
    client = world.anthropic(await world.open())
    with pytest.raises(
        anthropic.BadRequestError, match=rf"messages\[1\].content\[0\].{param} is missing"
    ):
        await ask(client, USER, {"role": role, "content": [block]}, USER)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"made_up": 1}}, "made_up"),
        ({"extra_body": {"context_management": {"edits": [{"type": "x"}]}}}, "context_management"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_its_name(
    world: GatewayWorld, settings: dict[str, Any], said: str
) -> None:
    client = world.anthropic(await world.open())
    with pytest.raises(anthropic.BadRequestError, match=said):
        await ask(client, USER, **settings)
