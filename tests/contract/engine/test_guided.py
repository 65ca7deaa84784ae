"""Replies that a grammar binds: engines with `features.guided`; others refuse them by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from tailrace_protos.generation import CallErrorCode, FinishReason, Guide, GuidedCalls
from tests.contract.engine.harness import (
    EOS,
    TOLERANCE,
    Asked,
    Bench,
    all_ended,
    own_logprobs,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIST = Guide(
    json.dumps({"type": "array", "items": {"enum": [1, 22, "AB"]}, "minItems": 2, "maxItems": 4})
)
STOPS = (EOS,)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with await Bench.start(max_running=64, kv_cache_tokens=16384) as made:
        yield made


@pytest.fixture
def guided(bench: Bench) -> Bench:
    if not bench.engine.features.guided:
        pytest.skip("this engine declares no guided decoding")
    return bench


def text(asked: Asked) -> str:
    """The reply without its stop id."""
    assert asked.new_ids[-1] == EOS
    return text_of(asked.new_ids[:-1])


def finished(many: list[Asked]) -> list[Asked]:
    return [asked for asked in many if asked.generation.finish_reason is FinishReason.STOP]


async def test_replies_fit_their_schema_whatever_the_model_prefers(guided: Bench) -> None:
    many = [
        guided.ask([3, 4, n], 60, guide=LIST, stop_token_ids=STOPS, temperature=1.5) for n in range(24)
    ]
    free = [guided.ask([n, 4], 40) for n in range(4)]
    await all_ended([*many, *free])
    assert len(finished(many)) > 12
    for asked in many:
        if asked.generation.finish_reason is FinishReason.LENGTH:
            assert text_of(asked.new_ids).startswith("[")
            continue
        value = json.loads(text(asked))
        assert len(value) >= 2
        assert all(item in (1, 22, "AB") for item in value)
        assert asked.generation.stop_matched == EOS
    assert max(asked.drift(guided.model).max() for asked in free) < TOLERANCE


async def test_logprobs_are_those_of_the_bound_distribution(guided: Bench) -> None:
    asked = await guided.one([5, 6], 30, guide=LIST, stop_token_ids=STOPS, tops=3, temperature=0.8)
    found = asked.generation.inference_logprobs
    assert abs(found[0]) < TOLERANCE, "the bracket is the only token that may come first"
    own = own_logprobs(guided.model, asked.ids, 0.8)[1:]
    taken = np.take_along_axis(own, np.array(asked.new_ids)[:, None], 1)[:, 0]
    assert (taken <= found + TOLERANCE).all()
    starts = [ord(char) - 33 for char in '12"']  # of an item
    bound = own[1] - np.logaddexp.reduce(own[1][starts])
    assert asked.new_ids[1] in starts
    assert abs(bound[asked.new_ids[1]] - found[1]) < TOLERANCE


async def test_calls_are_written_in_their_form_and_only_once_if_single(guided: Bench) -> None:
    schema = json.dumps(
        {"type": "array", "prefixItems": [{"const": "F"}], "items": False, "minItems": 1}
    )
    for is_single in (True, False):
        calls = GuidedCalls((schema, "3"), "<<", ">>", ";", is_single)
        guide = Guide(calls=GuidedCalls((schema,), calls.begin, calls.end, calls.separator, is_single))
        many = [
            guided.ask([7, n], 40, guide=guide, stop_token_ids=STOPS, temperature=2.0)
            for n in range(12)
        ]
        await all_ended(many)
        found = [text(asked) for asked in finished(many)]
        assert found
        for reply in found:
            assert set(reply.split(";")) == {'<<["F"]>>'}
        assert any(";" in reply for reply in found) is not is_single


async def test_thoughts_are_free_and_come_before_the_reply(guided: Bench) -> None:
    guide = Guide(LIST.json_schema, thought_end="=")
    many = [
        guided.ask([8, n], 200, guide=guide, stop_token_ids=STOPS, temperature=1.5) for n in range(24)
    ]
    await all_ended(many)
    found = [text(asked) for asked in finished(many)]
    assert found
    for reply in found:
        assert isinstance(json.loads(reply.partition("=")[2]), list)


async def test_a_guided_call_goes_on_after_tokens_of_another_server(guided: Bench) -> None:
    whole = await guided.one([9, 9], 60, guide=LIST, stop_token_ids=STOPS, temperature=0.0)
    begun = 3
    rest = await guided.one(
        [9, 9, *whole.new_ids[:begun]], 60 - begun, continued=begun, guide=LIST, stop_token_ids=STOPS,
        temperature=0.0,
    )  # fmt: skip
    assert rest.new_ids == whole.new_ids[begun:]


async def test_guided_calls_outlive_updates_and_pauses(guided: Bench) -> None:
    many = [guided.ask([n, 2], 120, guide=LIST, stop_token_ids=STOPS) for n in range(12)]
    await many[0].begun.wait()
    for _ in range(3):
        await guided.update()
    await all_ended(many)
    for asked in finished(many):
        assert all(item in (1, 22, "AB") for item in json.loads(text(asked)))


@pytest.mark.parametrize(
    ("guide", "stops", "words"),
    [
        (LIST, (), "stop_token_ids"),
        (Guide(), STOPS, "guide"),
        (Guide("{"), STOPS, "guide"),
        (Guide('"text"'), STOPS, "JSON Schema"),
        (Guide('{"type": "nothing"}'), STOPS, "guide"),
        (Guide(calls=GuidedCalls(())), STOPS, "schemas"),
    ],
    ids=str,
)
async def test_a_guide_that_cannot_be_followed_is_refused_by_name(
    bench: Bench, guide: Guide, stops: tuple[int, ...], words: str
) -> None:
    asked = await bench.one([1], 5, guide=guide, stop_token_ids=stops)
    assert asked.error.code is CallErrorCode.INVALID
    assert "guide" in asked.error.reason
    if bench.engine.features.guided:
        assert words in asked.error.reason


async def test_an_optional_guide_that_cannot_be_followed_leaves_the_reply_free(bench: Bench) -> None:
    guide = Guide('{"type": "nothing"}', is_optional=True)
    asked = await bench.one([1], 5, guide=guide, stop_token_ids=STOPS, temperature=0.0)
    free = await bench.one([1], 5, stop_token_ids=STOPS, temperature=0.0)
    assert asked.new_ids == free.new_ids
