"""Client of OpenAI chat completions: the endpoint, and messages as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from tailrace.proxy import proxy_for
from tailrace_agents.core.episode import EpisodeInfraError
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

TIMEOUT_S = 300.0


class EndpointFailedError(EpisodeInfraError):
    """The endpoint did not answer as an OpenAI endpoint does."""


class Endpoint(NamedTuple):
    """Address of a model. `url` ends with `/v1`."""

    url: str
    model: str
    api_key: str

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts to `/chat/completions`; raises `EndpointFailedError`."""
        url = f"{self.url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {self.api_key}"}
        try:
            async with (
                aiohttp.ClientSession(
                    headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
                ) as session,
                session.post(url, json={"model": self.model, **body}, proxy=proxy_for(url)) as response,
            ):
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise EndpointFailedError(f"{url} answered {response.status}: {text}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: not JSON
            raise EndpointFailedError(f"{url}: {type(error).__name__}: {error}") from error


def read_object(body: bytes) -> dict[str, Any]:
    """Parses a JSON object; other bodies give an empty one."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_answer(body: bytes) -> dict[str, Any]:
    """Reads the answer to a call: a JSON object, or the events of a stream put together.

    Of a stream of chat completions it has the first choice, whole, and the token counts; of a stream of
    another dialect the id alone. A body that is neither gives an empty object.
    """
    if answer := read_object(body):
        return answer
    events = _events_in(body)
    answer_id = next(filter(None, map(_id_in, events)), "")
    chunks = [one for event in events for one in event.get("choices") or () if not one.get("index")]
    if not answer_id and not chunks:
        return {}
    usages = [event["usage"] for event in events if event.get("usage")]
    choices = [_joined(chunks)] if chunks else []
    return {"id": answer_id, "choices": choices, "usage": usages[-1] if usages else {}}


def _events_in(body: bytes) -> list[dict[str, Any]]:
    lines = (line[5:] for line in body.splitlines() if line.startswith(b"data:"))
    return [event for event in map(read_object, lines) if event]


def _id_in(event: Mapping[str, Any]) -> str:
    said: Mapping[str, Any] = event.get("message") or event.get("response") or event
    return str(said.get("id") or "")


def _joined(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the chunks of one choice."""
    deltas = [chunk.get("delta") or {} for chunk in chunks]
    texts = {
        key: "".join(delta.get(key) or "" for delta in deltas)
        for key in ("content", "reasoning_content", "reasoning")
    }
    reasons = [chunk["finish_reason"] for chunk in chunks if chunk.get("finish_reason")]
    message = {"role": "assistant", **texts, "tool_calls": _joined_calls(deltas)}
    return {"message": message, "finish_reason": reasons[-1] if reasons else None}


def _joined_calls(deltas: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        empty = {"id": "", "function": {"name": "", "arguments": ""}}
        call, said = calls.setdefault(part.get("index", 0), empty), part.get("function") or {}
        call["id"] += part.get("id") or ""
        for key in call["function"]:
            call["function"][key] += said.get(key) or ""
    return [calls[place] for place in sorted(calls)]


def read_message(said: Mapping[str, Any]) -> ChatMessage:
    """Reads a message from JSON; of content in parts, it takes the text."""
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls") or ()
    )
    content = said.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
    return ChatMessage(
        said.get("role", "assistant"),
        content,
        calls,
        tool_call_id=said.get("tool_call_id", ""),
        reasoning=reasoning,
    )


def on_wire(message: ChatMessage) -> dict[str, Any]:
    """Encodes a message for `/chat/completions`."""
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        sent["tool_call_id"] = message.tool_call_id
    return sent


def schema_on_wire(tool: ToolSchema) -> dict[str, Any]:
    """Encodes a tool for `/chat/completions`."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
