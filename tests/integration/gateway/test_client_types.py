"""Answers and events have every field that the types of the vendors' clients require.

The clients check nothing: a field that is missing is an `AttributeError` where an agent reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.world.byte_model import call_text
from tests.world.gateway import GatewayWorld

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CHAT = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2}
MESSAGES = {"messages": [USER], "max_tokens": 500}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ANSWERS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": ("chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
    "chat with tools": (
        "chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "completions": ("completions", {"prompt": "Hi", "logprobs": 2}, Completion, None),
    "responses": ("responses", {"input": "Hi", **LOGPROBS}, Response, ResponseStreamEvent),
    "responses with tools": (
        "responses",
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        Response,
        ResponseStreamEvent,
    ),
    "messages": ("messages", MESSAGES, Message, RawMessageStreamEvent),
    "messages with tools": (
        "messages",
        {**MESSAGES, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
        Message,
        RawMessageStreamEvent,
    ),
}


def reply(*_: object) -> str:
    return "<think>Hm.</think>Yes." + call_text("weather", city="Rome")


def require_fields(kind: Any, given: dict[str, Any]) -> None:
    """Validate as the member of the union `kind` that has this `type`."""
    members = get_args(get_args(kind)[0]) if get_args(kind) else (kind,)
    fitting = [one for one in members if given.get("type") in _types(one)] or list(members)
    assert len(fitting) == 1
    pydantic.TypeAdapter(fitting[0]).validate_python(given)


def _types(member: Any) -> tuple[Any, ...]:
    field = member.model_fields.get("type")
    return get_args(field.annotation) if field else ()


def events_in(stream: str) -> Iterator[dict[str, Any]]:
    lines = [line for line in stream.splitlines() if line.startswith("data: {")]
    return (json.loads(line.removeprefix("data: ")) for line in lines)


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_and_events_have_all_fields(world: GatewayWorld, name: str) -> None:
    world.model.reply = reply
    path, body, answer_type, event_type = ANSWERS[name]
    http = world.http(await world.open())
    whole = await http.post(path, json=body)
    require_fields(answer_type, whole.json())
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    streamed = await http.post(path, json={**body, "stream": True, **options})
    events = list(events_in(streamed.text))
    assert events
    for event in events if event_type else ():
        require_fields(event_type, event)


async def test_models_and_counts_have_all_fields(world: GatewayWorld) -> None:
    http = world.http(await world.open())
    require_fields(Model, (await http.get("models")).json()["data"][0])
    theirs = {"anthropic-version": "2023-06-01"}
    require_fields(ModelInfo, (await http.get("models", headers=theirs)).json()["data"][0])
    counted = await http.post("messages/count_tokens", json={"messages": [USER]})
    require_fields(MessageTokensCount, counted.json())
    assert counted.json()["input_tokens"] > 0
