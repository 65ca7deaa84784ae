"""The likeliest tokens of each step with OpenAI's own client, in every dialect that has them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.world.byte_model import renderer
from tests.world.gateway import GatewayWorld
from tests.world.scripted_model import tops_of

USER: Any = {"role": "user", "content": "Hi"}
INCLUDE: Any = ["message.output_text.logprobs"]
IDS = [int(i) for i in renderer().reply_ids("Hello there.")]


def entry(
    token_id: int, logprob: float, no_bytes: list[int] | None = None
) -> tuple[str, float, list[int] | None]:
    text = renderer().token_text(token_id)
    return text, logprob, no_bytes if "\ufffd" in text else list(text.encode())


def told(entries: Any) -> list[Any]:
    """Return for each token of an answer its own entry and the alternatives."""
    return [
        ((one.token, one.logprob, one.bytes), [(t.token, t.logprob, t.bytes) for t in one.top_logprobs])
        for one in entries
    ]


def expected(num_tops: int, no_bytes: list[int] | None = None) -> list[Any]:
    return [
        (entry(i, -0.25, no_bytes), [entry(*top, no_bytes) for top in tops_of(i, num_tops)])
        for i in IDS
    ]


async def chat(client: openai.AsyncOpenAI, streams: bool, retry: str = "0", **settings: Any) -> Any:
    """Return the id of a chat completion and its entries, streamed or whole."""
    headers = {"x-stainless-retry-count": retry}
    answer: Any = await client.chat.completions.create(
        model="m", messages=[USER], logprobs=True, stream=streams, extra_headers=headers, **settings
    )
    if not streams:
        return answer.id, told(answer.choices[0].logprobs.content)
    chunks = [chunk async for chunk in answer]
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    return chunks[0].id, told([one for part in logprobs if part for one in part.content])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_tops", [0, 1, 20])
async def test_chat_completions_tell_as_many_as_were_asked_for(
    world: GatewayWorld, num_tops: int, streams: bool
) -> None:
    world.model.chunk = 3
    client = world.openai(await world.open())
    _, entries = await chat(client, streams, top_logprobs=num_tops)
    assert entries == expected(num_tops)
    assert world.model.requests[0].top_logprobs == num_tops


async def test_who_does_not_ask_gets_none(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    _, entries = await chat(client, streams=False)
    assert entries == expected(0)
    assert world.model.requests[0].top_logprobs == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_told_again_from_the_store_has_them_too(
    world: GatewayWorld, streams: bool
) -> None:
    client = world.openai(await world.open())
    first = await chat(client, streams, top_logprobs=3, n=1)
    again = await chat(client, streams, "1", top_logprobs=3, n=1)
    assert again == first
    assert first[1] == expected(3)
    assert len(world.model.requests) == 1


async def test_every_choice_has_its_own_also_when_told_again(world: GatewayWorld) -> None:
    world.model.reply = lambda _, request: f"seed {request.sampling.seed}"
    client = world.openai(await world.open(seed=7))
    answers: list[Any] = [
        await client.chat.completions.create(
            model="m",
            messages=[USER],
            n=2,
            logprobs=True,
            top_logprobs=2,
            extra_headers={"x-stainless-retry-count": retry},
        )
        for retry in ("0", "1")
    ]
    assert len(world.model.requests) == 2
    for answer in answers:
        for choice in answer.choices:
            ids = [int(i) for i in renderer().reply_ids(choice.message.content)]
            tops = [[entry(*top) for top in tops_of(i, 2)] for i in ids]
            assert [likely for _, likely in told(choice.logprobs.content)] == tops
    assert answers[0].choices == answers[1].choices


@pytest.mark.parametrize("streams", [False, True])
async def test_completions_tell_them_by_text_with_the_sampled_one(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.chunk = 3
    client = world.openai(await world.open())
    answer: Any = await client.completions.create(model="m", prompt="Once", logprobs=2, stream=streams)
    parts = [chunk async for chunk in answer] if streams else [answer]
    logprobs = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    likely = [one for part in logprobs for one in part.top_logprobs]
    text_of = renderer().token_text
    assert likely == [
        {**{text_of(top): logprob for top, logprob in reversed(tops_of(i, 2))}, text_of(i): -0.25}
        for i in IDS
    ]
    assert [one for part in logprobs for one in part.tokens] == [text_of(i) for i in IDS]


@pytest.mark.parametrize("streams", [False, True])
async def test_responses_tell_them_where_log_probabilities_are_included(
    world: GatewayWorld, streams: bool
) -> None:
    client = world.openai(await world.open())
    answer: Any = await client.responses.create(
        model="m", input="Hi", include=INCLUDE, top_logprobs=4, stream=streams
    )
    if streams:
        answer = [event async for event in answer][-1].response
    assert told(answer.output[0].content[0].logprobs) == expected(4, no_bytes=[])
    assert answer.top_logprobs == 4


@pytest.mark.parametrize(
    "settings", [{"top_logprobs": 21, "include": INCLUDE}, {"top_logprobs": 2}, {"top_logprobs": -1}]
)
async def test_responses_refuse_what_cannot_be_told_by_its_name(
    world: GatewayWorld, settings: dict[str, Any]
) -> None:
    client = world.openai(await world.open())
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="Hi", **settings)
    assert refused.value.param == "top_logprobs"
    assert not world.model.requests
