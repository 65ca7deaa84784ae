"""Client of OpenAI chat completions: the endpoint, and messages as JSON."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp

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
                session.post(url, json={"model": self.model, **body}) as response,
            ):
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise EndpointFailedError(f"{url} answered {response.status}: {text}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointFailedError(f"{url}: {type(error).__name__}: {error}") from error


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
