"""OpenAI's chat completions: request and answer.

The answer carries `reasoning_content` where the model thought first, and `token_ids` /
`prompt_token_ids` where `return_token_ids` asks for them, as other open servers do.
"""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.body import Neutral, Ranges, read_body
from tailrace_gateway.core.call import Choice, Completion, ModelCall
from tailrace_gateway.core.errors import InvalidRequestError
from tailrace_gateway.core.openai_answers import (
    TokenText,
    logprob_entries,
    tool_calls_of,
    whole_answer,
)
from tailrace_gateway.core.openai_fields import InMessage, InTool, read_messages, read_tools
from tailrace_gateway.core.openai_promises import read_promises
from tailrace_gateway.core.openai_request import OpenAIRequest
from tailrace_protos.generation import MAX_TOP_LOGPROBS

_NEUTRAL = Neutral(modalities=(["text"],), functions=([],), function_call=("auto", "none"))
_RANGES = Ranges(max_completion_tokens=(1, 1 << 31), top_logprobs=(0, MAX_TOP_LOGPROBS))


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of a chat completion. The second part is refused unless it changes nothing."""

    messages: list[InMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[InTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    # Said for somebody else's books: they change nothing in a reply.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def read_chat(raw: bytes) -> tuple[ChatRequest, ModelCall]:
    """The request and what it asks of the model; raises `InvalidRequestError`."""
    body = read_body(raw, ChatRequest)
    body.require_shared()
    _NEUTRAL.require(body)
    _RANGES.require(body)
    _require_logprobs(body)
    tools = read_tools(body.tools)
    return body, ModelCall(
        messages=read_messages(body.messages),
        tools=tools,
        num_choices=body.num_choices,
        max_new_tokens=_max_tokens(body),
        top_logprobs=body.top_logprobs or 0,
        sampling=body.wishes(),
        promises=read_promises(body.tool_choice, body.parallel_tool_calls, tools, body.response_format),
    )


def _max_tokens(body: ChatRequest) -> int | None:
    """The bound of the reply: the smaller one if both names are given."""
    if body.max_tokens is None or body.max_completion_tokens is None:
        return body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return min(body.max_tokens, body.max_completion_tokens)


def _require_logprobs(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")


def chat_answer(body: ChatRequest, completion: Completion, tokens: TokenText) -> dict[str, Any]:
    """The answer to a request that does not stream."""

    def tell(choice: Choice) -> dict[str, Any]:
        entries = logprob_entries(tokens, choice) if body.logprobs else None
        return {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": choice.ending.value,
        }

    return whole_answer(body, "chat.completion", completion, tell)


def _message(choice: Choice) -> dict[str, Any]:
    said = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = tool_calls_of(choice)
        message["content"] = said.content or None
    return message
