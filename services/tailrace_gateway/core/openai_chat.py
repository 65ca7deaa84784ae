"""OpenAI's chat completions: request, answer, stream.

The answer carries `reasoning_content` where the model thought first, and `token_ids` /
`prompt_token_ids` where `return_token_ids` asks for them, as other open servers do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace_gateway.core.body import (
    Body,
    read_body,
    refuse,
    require_range,
    stop_strings,
)
from tailrace_gateway.core.call import (
    Choice,
    Completion,
    ModelCall,
    SamplingWishes,
)
from tailrace_gateway.core.errors import InvalidRequestError, UnsupportedError
from tailrace_gateway.core.openai_fields import (
    InMessage,
    InTool,
    TokenText,
    format_promise,
    logprob_entries,
    read_messages,
    read_tools,
    tool_calls_of,
    tool_promises,
    usage_of,
)

MAX_CHOICES = 128


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ChatRequest(Body, frozen=True, kw_only=True):
    """The body of a chat completion. The second half is refused unless it changes nothing."""

    messages: list[InMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[InTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    # Said for somebody else's books: they change nothing in a reply.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def read_chat(raw: bytes) -> tuple[ChatRequest, ModelCall]:
    """The request and what it asks of the model; raises `InvalidRequestError`."""
    body = read_body(raw, ChatRequest)
    refuse(
        body,
        ("frequency_penalty", (None, 0)),
        ("presence_penalty", (None, 0)),
        ("logit_bias", (None, {})),
        ("modalities", (None, ["text"])),
        ("functions", (None, [])),
        ("function_call", (None, "auto", "none")),
    )
    require_sampling(body)
    _require_logprobs(body)
    tools = read_tools(body.tools)
    promises = tool_promises(body.tool_choice, body.parallel_tool_calls, tools)
    format_fields = format_promise(body.response_format)
    return body, ModelCall(
        messages=read_messages(body.messages),
        tools=tools,
        num_choices=num_choices(body),
        max_new_tokens=max_tokens(body),
        sampling=wishes(body),
        promises=msgspec.structs.replace(promises, **format_fields) if format_fields else promises,
    )


def require_sampling(body: Body) -> None:
    """Refuse sampling parameters out of range."""
    for name, low, high in (
        ("temperature", 0, 100),
        ("top_p", 1e-6, 1),
        ("top_k", -1, 1 << 30),
        ("min_p", 0, 1),
        ("seed", -(1 << 63), (1 << 63) - 1),
    ):
        require_range(body, name, low, high)


def wishes(body: Any) -> SamplingWishes:
    """What a request of OpenAI's dialects says of sampling; `top_k` -1 is "from all", as in vLLM."""
    return SamplingWishes(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        seed=body.seed,
        stop=stop_strings(body.stop),
    )


def num_choices(body: Any) -> int:
    """`n`."""
    require_range(body, "n", 1, MAX_CHOICES)
    return int(body.n or 1)


def max_tokens(body: ChatRequest) -> int | None:
    """The bound of the reply: the smaller one if both names are given."""
    given = []
    for name in ("max_tokens", "max_completion_tokens"):
        require_range(body, name, 1, 1 << 31)
        if getattr(body, name) is not None:
            given.append(int(getattr(body, name)))
    return min(given) if given else None


def _require_logprobs(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs:
        raise UnsupportedError(
            "top_logprobs: the engine keeps the sampled token's log-probability only; use 0",
            param="top_logprobs",
        )


def chat_answer(body: ChatRequest, completion: Completion, tokens: TokenText) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    opening = completion.opening
    answer: dict[str, Any] = {
        "id": opening.completion_id,
        "object": "chat.completion",
        "created": opening.created_unix_s,
        "model": body.model,
        "choices": [_choice(body, choice, tokens) for choice in completion.choices],
        "usage": usage_of(completion),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = opening.prompt_ids.tolist()
    return answer


def _choice(body: ChatRequest, choice: Choice, tokens: TokenText) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content, "refusal": None}
    if choice.message.reasoning:
        message["reasoning_content"] = choice.message.reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = tool_calls_of(choice)
        message["content"] = choice.message.content or None
    told: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": choice.ending.value,
    }
    if body.logprobs:
        told["logprobs"] = {"content": logprob_entries(tokens, choice.token_ids, choice.logprobs)}
    if body.return_token_ids:
        told["token_ids"] = choice.token_ids.tolist()
    return told
