"""OpenAI's responses: request and answer.

`previous_response_id` continues the conversation of that response within the session. Its system
message stays unless `instructions` give another one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace_gateway.core.body import Body, Neutral, Ranges, read_body
from tailrace_gateway.core.call import Completion, Ending, ModelCall, SamplingWishes
from tailrace_gateway.core.errors import InvalidRequestError, UnsupportedError
from tailrace_gateway.core.openai_answers import TokenText
from tailrace_gateway.core.openai_fields import InSchema, refuse_prefill, schema_of
from tailrace_gateway.core.openai_promises import read_promises
from tailrace_gateway.core.responses_items import InItem, output_items, read_items
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import MAX_TOP_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")  # thoughts come in plain words anyway
_NEUTRAL = Neutral(
    background=(False,),
    conversation=(),
    prompt=(),
    truncation=("disabled",),
    max_tool_calls=(),
)
_RANGES = Ranges(
    max_output_tokens=(1, 1 << 31),
    temperature=(0, 100),
    top_p=(1e-6, 1),
    top_logprobs=(0, MAX_TOP_LOGPROBS),
)


class ResponseTool(InSchema, frozen=True):
    """A function as responses write it; tools that OpenAI runs have another `type`."""

    type: str = "function"


class TextFormat(Body, frozen=True, kw_only=True):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseRequest(Body, frozen=True, kw_only=True):
    """The body of a response. The second half is refused unless it changes nothing."""

    input: str | list[InItem] = ""
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    # Said for somebody else's books: they change nothing in a reply.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    user: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return _LOGPROBS in (self.include or ())


def read_response(raw: bytes) -> tuple[ResponseRequest, ModelCall]:
    """The request and what it asks of the model; raises `InvalidRequestError`."""
    body = read_body(raw, ResponseRequest)
    _refuse_unsupported(body)
    tools = _tools(body.tools or [])
    wanted = body.text.format if body.text else None
    return body, ModelCall(
        messages=_messages(body),
        previous_id=body.previous_response_id or "",
        tools=tools,
        max_new_tokens=body.max_output_tokens,
        top_logprobs=body.top_logprobs or 0,
        sampling=SamplingWishes(temperature=body.temperature, top_p=body.top_p),
        promises=read_promises(
            body.tool_choice, body.parallel_tool_calls, tools, wanted, "text.format"
        ),
    )


def _refuse_unsupported(body: ResponseRequest) -> None:
    _NEUTRAL.require(body)
    _RANGES.require(body)
    if body.top_logprobs and not body.with_logprobs:
        reason = f"top_logprobs needs include: [{_LOGPROBS!r}]"
        raise InvalidRequestError(reason, param="top_logprobs")
    if any(value is not None for value in (body.reasoning or {}).values()):
        reason = "reasoning: the model thinks as it was trained to; leave it out"
        raise UnsupportedError(reason, param="reasoning")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise UnsupportedError("text.verbosity is not supported here", param="text.verbosity")
    unknown = set(body.include or ()) - set(_INCLUDES)
    if unknown:
        raise UnsupportedError(f"include: {min(unknown)!r} is not supported here", param="include")


def _messages(body: ResponseRequest) -> tuple[ChatMessage, ...]:
    new = read_items(body.input)
    if not new or (new == (ChatMessage("user", ""),)):
        raise InvalidRequestError("input: at least one item is needed", param="input")
    refuse_prefill(new, "input")
    return (ChatMessage("system", body.instructions), *new) if body.instructions else new


def _tools(tools: list[Any]) -> tuple[ToolSchema, ...]:
    read = []
    for index, given in enumerate(tools):
        kind = given.get("type", "") if isinstance(given, dict) else ""
        param = f"tools[{index}]"
        if kind != "function":
            raise UnsupportedError(
                f"{param}.type: only functions are supported, not {kind!r}", param=f"{param}.type"
            )
        try:
            read.append(schema_of(msgspec.convert(given, ResponseTool)))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{param}: {error}", param=param) from error
    return tuple(read)


def response_base(body: ResponseRequest, completion_id: str, created_unix_s: int) -> dict[str, Any]:
    """A response that has only begun."""
    return {
        "id": completion_id,
        "object": "response",
        "created_at": created_unix_s,
        "status": "in_progress",
        "model": body.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "metadata": body.metadata or {},
        "usage": None,
    }


def response_answer(body: ResponseRequest, completion: Completion, tokens: TokenText) -> dict[str, Any]:
    """The whole response."""
    choice = completion.choices[0]
    is_cut = choice.ending is Ending.LENGTH
    opening = completion.opening
    return {
        **response_base(body, opening.completion_id, opening.created_unix_s),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(choice, tokens, with_logprobs=body.with_logprobs),
        "usage": _usage(completion),
    }


def _usage(completion: Completion) -> dict[str, Any]:
    """Token counts; tokens of thoughts are not counted apart."""
    prompt, sampled = completion.num_prompt_tokens, completion.num_sampled
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": completion.num_cached_tokens},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
