"""Chat completions with OpenAI's own client, over real HTTP, NATS, Redis and ZMQ."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest

from tailrace_protos.base import as_int32, as_uint8
from tailrace_protos.generation import SamplingParams
from tests.world.byte_model import call_text, renderer
from tests.world.gateway import GatewayWorld
from tests.world.scripted_model import text_of
from tests.world.serving import eventually

USER = {"role": "user", "content": "Hi"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def chat(client: openai.AsyncOpenAI, *messages: Any, **settings: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=list(messages), **settings)


async def streamed(client: openai.AsyncOpenAI, *messages: Any, **settings: Any) -> list[Any]:
    stream = await chat(client, *messages, stream=True, **settings)
    return [chunk async for chunk in stream]


def prompt_ids(world: GatewayWorld, index: int) -> list[int]:
    return list(as_int32(world.model.requests[index].prompt_ids).tolist())


async def test_a_conversation_of_two_turns_is_one_sequence_of_tokens(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    first = await chat(client, USER, extra_body={"return_token_ids": True})
    assert first.choices[0].message.content == "Hello there."
    assert first.choices[0].finish_reason == "stop"
    reply = first.choices[0].message.model_dump()
    await chat(client, USER, reply, {"role": "user", "content": "And?"})
    seen = prompt_ids(world, 0) + first.choices[0].token_ids
    assert prompt_ids(world, 1)[: len(seen)] == seen
    export = await world.export(rewards={"": 1.0})
    assert export.metrics["num_forks"] == 0
    assert [row.reward for row in export.rows] == [1.0, 1.0]
    trained = np.frombuffer(export.rows[0].loss_mask, np.uint8).astype(bool)
    assert as_int32(export.rows[0].token_ids)[trained].tolist() == first.choices[0].token_ids


async def test_a_stream_tells_tokens_while_the_model_still_samples(world: GatewayWorld) -> None:
    world.model.hold, world.model.num_before_hold = True, 5
    client = world.openai(await world.open())
    stream = await chat(
        client, USER, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content == "Hello":
            assert world.model.num_held == 1
            world.model.release()
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len("Hello there.") + 1
    entries = [e for c in chunks if c.choices for e in (c.choices[0].logprobs or _NONE).content]
    assert "".join(entry.token for entry in entries) == "Hello there.<|im_end|>"
    assert {entry.logprob for entry in entries} == {-0.25}


class _NONE:
    content: tuple[Any, ...] = ()


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_calls_come_out_and_their_results_continue_the_tokens(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.chunk = 3
    world.model.reply = lambda prompt, _: (
        "Sunny." if "18 degrees" in prompt else "Let me see." + call_text("weather", city="Rome")
    )
    client = world.openai(await world.open())
    if streams:
        chunks = await streamed(client, USER, tools=[WEATHER])
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = (await chat(client, USER, tools=[WEATHER])).choices[0]
        calls, content, reason = choice.message.tool_calls, choice.message.content, choice.finish_reason
    assert (content, reason, len(calls)) == ("Let me see.", "tool_calls", 1)
    assert json.loads(calls[0].function.arguments) == {"city": "Rome"}
    reply = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": calls[0].id,
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees"}
    last = await chat(client, USER, reply, result, tools=[WEATHER])
    assert last.choices[0].message.content == "Sunny."
    export = await world.export()
    assert export.metrics["num_forks"] == 0
    assert export.metrics["num_tool_calls"] == 1


@pytest.mark.parametrize(
    ("settings", "reply", "code"),
    [
        ({"tool_choice": "required"}, "No.", "tool_choice_not_met"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            call_text("other"),
            "tool_choice_not_met",
        ),
        (
            {"parallel_tool_calls": False},
            call_text("weather") + call_text("weather"),
            "parallel_tool_calls_not_met",
        ),
        ({"response_format": {"type": "json_object"}}, "[1]", "response_format_not_met"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"required": ["x"]}},
                }
            },
            "{}",
            "response_format_not_met",
        ),
    ],
)
async def test_a_broken_promise_is_passed_or_refused_and_counted(
    empty_world: GatewayWorld, settings: dict[str, Any], reply: str, code: str
) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise="refuse")
    world.model.reply = lambda *_: reply
    client = world.openai(await world.open())
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        await chat(client, USER, tools=[WEATHER], **settings)
    assert refused.value.code == code
    assert len(world.model.requests) == 1
    completion_id = refused.value.body["completion_id"]  # type: ignore[index]
    export = await world.export(rewards={completion_id: -1.0})
    assert [row.reward for row in export.rows] == [-1.0]
    assert export.metrics["num_broken_constraints"] == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_broken_promise_passes_by_default_so_that_the_framework_can_mend_it(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.reply = lambda *_: "No."
    client = world.openai(await world.open())
    if streams:
        chunks = await streamed(client, USER, tools=[WEATHER], tool_choice="required")
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        answer = await chat(client, USER, tools=[WEATHER], tool_choice="required")
        content = answer.choices[0].message.content
    assert content == "No."
    assert (await world.export()).metrics["num_broken_constraints"] == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_broken_promise_is_sampled_again_and_its_reply_gets_reward_0(
    empty_world: GatewayWorld, streams: bool
) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise="ask_again", max_asks=3)
    replies = ["No.", "Never.", '{"x": 1}', "Bye."]
    world.model.reply = lambda *_: replies[len(world.model.requests) - 1]
    client = world.openai(await world.open())
    form = {"response_format": {"type": "json_object"}}
    if streams:
        chunks = await streamed(client, USER, **form)
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        content = (await chat(client, USER, **form)).choices[0].message.content
    assert content == '{"x": 1}'
    reply = {"role": "assistant", "content": content}
    await chat(client, USER, reply, USER)
    export = await world.export(rewards={"": 1.0})
    assert [row.reward for row in export.rows] == [0.0, 0.0, 1.0, 1.0]
    assert (export.metrics["num_forks"], export.metrics["num_broken_constraints"]) == (0, 2)


async def test_asking_again_ends_with_the_last_reply_or_with_the_budget(
    empty_world: GatewayWorld,
) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise="ask_again", max_asks=3)
    world.model.reply = lambda *_: "No."
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    for max_new_tokens, num_asked in ((500, 3), (6, 2)):
        world.model.requests.clear()
        client = world.openai(await world.open(f"g{num_asked}.0", max_new_tokens=max_new_tokens))
        await chat(client, USER, **form)
        assert len(world.model.requests) == num_asked
    assert [request.max_new_tokens for request in world.model.requests] == [6, 2]
    world.model.requests.clear()
    await chat(world.openai(await world.open("g9.0")), USER, temperature=0, **form)
    assert len(world.model.requests) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_with_tool_choice_none_a_call_is_text(world: GatewayWorld, streams: bool) -> None:
    world.model.reply = lambda *_: "<think>Hm.</think>" + call_text("weather")
    client = world.openai(await world.open())
    settings: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "none"}
    if streams:
        chunks = await streamed(client, USER, **settings)
        assert not any(c.choices[0].delta.tool_calls for c in chunks)
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        choice = (await chat(client, USER, **settings)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        content = choice.message.content
    assert content == call_text("weather")
    await chat(client, USER, {"role": "assistant", "content": content}, USER, **settings)
    assert (await world.export()).metrics["num_forks"] == 0


async def test_arguments_of_the_template_reach_it(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    silent: dict[str, Any] = {"chat_template_kwargs": {"no_thoughts": True, "unread": 1}}
    first = await chat(client, USER, extra_body=silent)
    assert world.model.prompt().endswith("assistant\n<think></think>")
    reply = first.choices[0].message.model_dump()
    await chat(client, USER, reply, USER, extra_body=silent)
    assert (await world.export()).metrics["num_forks"] == 0
    await chat(world.openai(await world.open("g1.0")), USER, reasoning_effort="low")
    assert not world.model.prompt().endswith("</think>")
    for wrong in ({"messages": []}, {"tools": []}):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            await chat(client, USER, extra_body={"chat_template_kwargs": wrong})


async def test_template_arguments_that_change_render_the_conversation_anew(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    first = await chat(client, USER)
    reply = first.choices[0].message.model_dump()
    silent = {"chat_template_kwargs": {"no_thoughts": True}}
    await chat(client, USER, reply, USER, extra_body=silent)
    assert world.model.prompt().endswith("<think></think>")
    assert (await world.export()).metrics["num_forks"] == 1


@pytest.mark.parametrize("reference", ["https://schemas.example/x.json", "#/$defs/none", "other"])
async def test_a_schema_that_refers_to_nothing_is_refused_before_sampling(
    world: GatewayWorld, reference: str
) -> None:
    client = world.openai(await world.open())
    inner = {"type": "object", "properties": {"x": {"$ref": reference}}}
    with pytest.raises(openai.BadRequestError, match="which its \\$ref names"):
        await chat(client, USER, response_format=form_of(inner))
    assert world.model.requests == []


async def test_a_schema_that_is_nested_too_deeply_is_refused_before_sampling(
    world: GatewayWorld,
) -> None:
    client = world.openai(await world.open())
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"not": nested}
    with pytest.raises(openai.BadRequestError, match="nested too deeply: name its parts in \\$defs"):
        await chat(client, USER, response_format=form_of(nested))
    assert world.model.requests == []


@pytest.mark.parametrize(
    ("schema", "reply"),
    [
        ({"$ref": "#"}, '{"x": 1}'),
        ({"properties": {"x": {"pattern": "^(a|a?)+$"}}}, '{"x": "' + "a" * 40 + '!"}'),
        ({"type": "object"}, "[" * 3000),
    ],
)
async def test_a_check_of_the_schema_ends(
    world: GatewayWorld, schema: dict[str, Any], reply: str
) -> None:
    world.model.reply = lambda *_: reply
    client = world.openai(await world.open())
    answer = await chat(client, USER, response_format=form_of(schema))
    assert answer.choices[0].message.content == reply
    assert (await world.export()).metrics["num_broken_constraints"] == 1


async def test_a_schema_may_refer_to_its_own_parts(world: GatewayWorld) -> None:
    world.model.reply = lambda *_: '{"next": {"next": {}}}'
    client = world.openai(await world.open())
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    named = {"$id": "https://schemas.example/a", "$ref": "b", "$defs": {"x": {"$id": "b"}}}
    await chat(client, USER, response_format=form_of({"$ref": "#/$defs/node", "$defs": {"node": node}}))
    await chat(client, USER, response_format=form_of(named))
    assert (await world.export()).metrics["num_broken_constraints"] == 0


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


async def test_a_kept_promise_passes(world: GatewayWorld) -> None:
    world.model.reply = lambda *_: '{"x": 1}'
    client = world.openai(await world.open())
    schema = {"name": "a", "schema": {"required": ["x"]}}
    answer = await chat(client, USER, response_format={"type": "json_schema", "json_schema": schema})
    assert answer.choices[0].message.content == '{"x": 1}'


async def test_choices_are_samples_of_their_own_and_train_apart(world: GatewayWorld) -> None:
    world.model.reply = lambda _, request: f"seed {request.sampling.seed}"
    client = world.openai(await world.open(seed=7))
    answer = await chat(client, USER, n=3)
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) == 3
    export = await world.export(rewards={answer.id: 1.0, f"{answer.id}-1": 0.5})
    assert [row.reward for row in export.rows] == [1.0, 0.5, 0.0]


async def test_a_seed_in_the_request_fixes_the_sample(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    await chat(client, USER, seed=11)
    await chat(client, USER, seed=11)
    assert [request.sampling.seed for request in world.model.requests] == [11, 11]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]])
async def test_a_stop_string_ends_the_reply_and_is_no_part_of_it(
    world: GatewayWorld, stop: str | list[str], streams: bool
) -> None:
    world.model.chunk = 2
    world.model.reply = lambda *_: "One two STOP three"
    client = world.openai(await world.open())
    if streams:
        chunks = await streamed(client, USER, stop=stop)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = await chat(client, USER, stop=stop)
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    assert text.rstrip() == "One two"
    await chat(client, USER, {"role": "assistant", "content": text}, USER)
    assert "One two STOP<|im_end|>" in world.model.prompt()
    assert (await world.export()).metrics["num_forks"] == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_token_ends_the_reply_and_is_no_part_of_its_text(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.chunk = 2
    world.model.reply = lambda *_: "One! two"
    client = world.openai(await world.open())
    (stop_id,) = renderer().encode("!").tolist()
    told = {"extra_body": {"stop_token_ids": [stop_id], "return_token_ids": True}}
    if streams:
        chunks = await streamed(client, USER, **told)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        ids = [one for c in chunks for one in getattr(c.choices[0], "token_ids", ())]
    else:
        choice = (await chat(client, USER, **told)).choices[0]
        text, ids = choice.message.content, choice.token_ids
    assert (text, ids) == ("One", renderer().encode("One!").tolist())
    await chat(client, USER, {"role": "assistant", "content": text}, USER)
    assert "One!<|im_end|>" in world.model.prompt()
    assert (await world.export()).metrics["num_forks"] == 0


@pytest.mark.parametrize("marker", ["</tool_call>", "</think>"])
async def test_a_marker_as_stop_token_still_ends_the_call_or_the_thought(
    world: GatewayWorld, marker: str
) -> None:
    world.model.reply = lambda *_: "<think>Hm.</think>" + call_text("weather") + " and more"
    client = world.openai(await world.open())
    told = {"extra_body": {"stop_token_ids": renderer().encode(marker).tolist()}}
    message = (await chat(client, USER, tools=[WEATHER], **told)).choices[0].message
    assert message.reasoning_content == "Hm."
    calls = [call.function.name for call in message.tool_calls or ()]
    assert calls == (["weather"] if marker == "</tool_call>" else [])
    assert not message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_reply_that_is_cut_says_length(world: GatewayWorld, name: str) -> None:
    client = world.openai(await world.open())
    answer = await chat(client, USER, **{name: 4})
    assert answer.choices[0].message.content == "Hell"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


async def test_thoughts_are_told_apart_and_need_not_come_back(world: GatewayWorld) -> None:
    world.model.reply = lambda prompt, _: "Fine." if "more" in prompt else "<think>Hm.</think>Yes."
    client = world.openai(await world.open())
    message = (await chat(client, USER)).choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Yes.", "Hm.", "Hm.")
    deltas = [chunk.choices[0].delta async for chunk in await chat(client, USER, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "Hm."
    more = {"role": "user", "content": "more"}
    await chat(client, USER, {"role": "assistant", "content": "Yes."}, more)
    assert "<think>Hm.</think>Yes.<|im_end|>" in world.model.prompt()


async def test_the_request_overrides_the_sampling_of_the_session(world: GatewayWorld) -> None:
    opened = await world.open(sampling=SamplingParams(temperature=0.5, top_p=0.9))
    client = world.openai(opened)
    await chat(client, USER, temperature=0.0, extra_body={"top_k": 3})
    sampling = world.model.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.9, 3)
    assert sampling.stop_token_ids == renderer().stop_token_ids


HUGE = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [HUGE]}, "tools"),
        ({"extra_body": {"stop_token_ids": [2**70]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_its_name(
    world: GatewayWorld, settings: dict[str, Any], param: str
) -> None:
    client = world.openai(await world.open())
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, USER, **settings)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert not world.model.requests


async def test_a_stream_that_fails_late_raises_in_the_client(world: GatewayWorld) -> None:
    world.model.hold, world.model.num_before_hold = True, 3
    client = world.openai(await world.open(), max_retries=0)
    stream = await chat(client, USER, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await world.close()
    with pytest.raises(openai.APIError, match="closed while this call ran"):
        await anext(stream)
    await eventually(lambda: len(world.model.aborted) == 1)


async def test_an_edited_history_forks_and_is_not_trained_twice(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    await chat(client, USER)
    await chat(client, USER, {"role": "assistant", "content": "Goodbye."}, USER)
    export = await world.export(rewards={"": 1.0})
    assert export.metrics["num_forks"] == 1
    row = export.rows[1]
    trained = as_uint8(row.loss_mask).astype(bool)
    assert text_of(as_int32(row.token_ids)[trained]) == "Hello there.<|im_end|>"
    assert "Goodbye." in text_of(as_int32(row.token_ids)[~trained])


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_that_ends_at_once_is_empty_and_its_end_is_trained(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.reply = lambda *_: ""
    client = world.openai(await world.open())
    if streams:
        chunks = await streamed(client, USER)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = (await chat(client, USER)).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == ("", "stop")
    again = {"role": "assistant", "content": text}
    await chat(client, USER, again, {"role": "user", "content": "And?"})
    export = await world.export(rewards={"": 1.0})
    assert export.metrics["num_forks"] == 0
    for row in export.rows:
        trained = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
        assert as_int32(row.token_ids)[trained].tolist() == [renderer().end_of_turn_id]
