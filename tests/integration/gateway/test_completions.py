"""Completions with OpenAI's own client: token ids in and out."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tailrace_protos.base import as_int32
from tests.world.byte_model import renderer
from tests.world.gateway import GatewayWorld

IDS = [int(i) for i in renderer().encode("Once upon")]


async def complete(client: openai.AsyncOpenAI, prompt: Any, **settings: Any) -> Any:
    return await client.completions.create(model="m", prompt=prompt, **settings)


async def test_ids_are_continued_as_they_are_and_matched_by_their_prefix(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    told = {"return_token_ids": True}
    first = await complete(client, IDS, logprobs=0, extra_body=told)
    choice = first.choices[0]
    assert choice.text == "Hello there."
    assert as_int32(world.model.requests[0].prompt_ids).tolist() == IDS == first.prompt_token_ids
    assert choice.logprobs.token_logprobs == [-0.25] * len(choice.token_ids)
    assert "".join(choice.logprobs.tokens) == "Hello there.<|im_end|>"
    await complete(client, [IDS + choice.token_ids + IDS], extra_body=told)
    export = await world.export()
    assert export.metrics["num_forks"] == 0
    assert len(export.rows) == 2


async def test_bare_text_is_encoded_once(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    answer = await complete(client, "Once upon", max_tokens=4)
    assert as_int32(world.model.requests[0].prompt_ids).tolist() == IDS
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "length")
    assert answer.usage.prompt_tokens == len(IDS)


@pytest.mark.parametrize("streams", [False, True])
async def test_every_prompt_of_a_list_gets_its_choices(world: GatewayWorld, streams: bool) -> None:
    world.model.reply = lambda prompt, _: prompt.upper()
    client = world.openai(await world.open())
    settings: dict[str, Any] = {"n": 2, "extra_body": {"return_token_ids": True}}
    for prompts in (["one", "four"], [renderer().encode(text).tolist() for text in ("one", "four")]):
        texts, lengths = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
        if streams:
            async for chunk in await complete(client, prompts, stream=True, **settings):
                (choice,) = chunk.choices  # clients read the first one of each chunk
                texts[choice.index] += choice.text
                lengths[choice.index] += len(getattr(choice, "prompt_token_ids", ()))
        else:
            answer = await complete(client, prompts, **settings)
            texts = {choice.index: choice.text for choice in answer.choices}
            assert answer.usage.prompt_tokens == len("onefour")
            lengths = {choice.index: len(choice.prompt_token_ids) for choice in answer.choices}
        assert list(lengths.values()) == [3, 3, 4, 4]
        assert list(texts.values()) == ["ONE", "ONE", "FOUR", "FOUR"]
    assert (await world.export()).metrics["num_calls"] == 8


async def test_a_retry_gets_all_prompts_answered_again(world: GatewayWorld) -> None:
    world.model.reply = lambda prompt, _: prompt.upper()
    http = world.http(await world.open())
    body = {"prompt": ["one", "four"], "n": 2, "return_token_ids": True}
    headers = {"idempotency-key": "k"}
    first, again = [await http.post("completions", json=body, headers=headers) for _ in range(2)]
    assert first.json() == again.json()
    assert len(world.model.requests) == 4


async def test_a_stream_tells_text_and_ids(world: GatewayWorld) -> None:
    world.model.chunk = 4
    client = world.openai(await world.open())
    stream = await complete(
        client,
        IDS,
        stream=True,
        stop=" there",
        logprobs=0,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == "Hello"
    ids = [i for choice in choices for i in (getattr(choice, "token_ids", None) or ())]
    assert ids == [int(i) for i in renderer().encode("Hello there")]
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("rule", ["pass", "ask_again", "refuse"])
async def test_a_format_binds_a_text_as_it_binds_a_reply(
    empty_world: GatewayWorld, rule: str, streams: bool
) -> None:
    world = empty_world
    await world.start_gateway(on_broken_promise=rule, max_asks=3)
    replies = ["No.", '{"x": 1}']
    world.model.reply = lambda *_: replies[len(world.model.requests) - 1]
    client = world.openai(await world.open(), max_retries=0)
    wanted = {"extra_body": {"response_format": {"type": "json_object"}}}

    async def text() -> str:
        answer = await complete(client, "x", stream=streams, **wanted)
        if not streams:
            return str(answer.choices[0].text)
        return "".join([chunk.choices[0].text async for chunk in answer])

    if rule == "refuse":
        with pytest.raises(openai.APIError, match="not valid JSON"):
            await text()
    else:
        assert await text() == {"pass": "No.", "ask_again": '{"x": 1}'}[rule]
    guide = world.model.requests[0].guide
    assert guide is not None
    assert guide.json_schema == '{"type": "object"}'
    assert (await world.export()).metrics["num_broken_constraints"] == 1


@pytest.mark.parametrize(
    ("prompt", "settings", "param"),
    [
        (["a", [1]], {}, "prompt"),
        ([[1], []], {}, "prompt"),
        (["a", ""], {}, "prompt"),
        (["a"] * 129, {}, "prompt"),
        ([-1], {}, "prompt"),
        ([], {}, "prompt"),
        ("x", {"echo": True}, "echo"),
        ("x", {"logprobs": 6}, "logprobs"),
        ("x", {"logprobs": -1}, "logprobs"),
        ("x", {"best_of": 2}, "best_of"),
        ("x", {"suffix": "y"}, "suffix"),
        ("x", {"extra_body": {"response_format": {"type": "grammar"}}}, "response_format"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_its_name(
    world: GatewayWorld, prompt: Any, settings: dict[str, Any], param: str
) -> None:
    client = world.openai(await world.open())
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, prompt, **settings)
    assert refused.value.param == param
