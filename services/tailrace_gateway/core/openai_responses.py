"""OpenAI's responses dialect: requests, responses and streams.

`previous_response_id` continues the conversation of that response within the session. The conversation
keeps its system message unless `instructions` replace it.
"""

from typing import Any

import msgspec

from tailrace_gateway.core.body import Body, DefaultOnly, NumberRanges, read_body
from tailrace_gateway.core.call import (
    CallStart,
    Completion,
    ItemReference,
    ModelCall,
    Piece,
    ReplyChoice,
    StopReason,
)
from tailrace_gateway.core.errors import ApiError, BadRequestError, UnsupportedError
from tailrace_gateway.core.openai_answers import TokenText, openai_error
from tailrace_gateway.core.openai_request import (
    InSchema,
    read_constraints,
    refuse_prefill,
    schema_of,
    template_args,
)
from tailrace_gateway.core.openai_response_items import (
    InItem,
    call_item,
    message_item,
    output_items,
    read_items,
    reasoning_item,
    text_part,
)
from tailrace_gateway.core.openai_sampling import SampledRequest
from tailrace_gateway.core.response_references import merged
from tailrace_gateway.core.sse import named_event
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema
from tailrace_protos.generation import MAX_TOP_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
# Reasoning is always sent as plain text; no item here has the rest, which tools at OpenAI give.
_INCLUDES = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_DEFAULT_ONLY = DefaultOnly(
    background=(False,),
    conversation=(),
    prompt=(),
    truncation=("disabled",),
)
_RANGES = NumberRanges(max_output_tokens=(1, 1 << 31), top_logprobs=(0, MAX_TOP_LOGPROBS))


class ResponseTool(InSchema, frozen=True):
    """Function in the format of responses; tools that OpenAI runs have another `type`."""

    type: str = "function"


class TextFormat(Body, frozen=True, kw_only=True):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseRequest(SampledRequest, frozen=True, kw_only=True):
    """Body of a response request. Fields of the second group are accepted only without effect."""

    input: str | list[InItem] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    # Metadata of the client without effect on a reply; `max_tool_calls` bounds OpenAI's own tools.
    max_tool_calls: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """True if the response includes log-probabilities."""
        return _LOGPROBS in (self.include or ())


def read_response(raw: bytes) -> tuple[ResponseRequest, ModelCall]:
    """Parse a request; return its body and its model call. Raise `BadRequestError`."""
    body = read_body(raw, ResponseRequest)
    _refuse_unsupported(body)
    tools = _tools(body.tools or [])
    wanted = body.text.format if body.text else None
    messages, items = _conversation(body)
    return body, ModelCall(
        messages=messages,
        items=items,
        previous_id=body.previous_response_id or "",
        has_new_system=bool(body.instructions),
        tools=tools,
        finds_calls=body.tool_choice != "none",
        template_args=template_args(
            body.chat_template_kwargs,
            (body.reasoning or {}).get("effort"),
            "reasoning.effort",
            body.text.verbosity if body.text else None,
        ),
        max_new_tokens=body.max_output_tokens,
        top_logprobs=body.top_logprobs or 0,
        sampling=body.overrides(),
        constraints=read_constraints(
            body.tool_choice, body.parallel_tool_calls, tools, wanted, "text.format"
        ),
    )


def _refuse_unsupported(body: ResponseRequest) -> None:
    body.require_sampling()
    _DEFAULT_ONLY.require(body)
    _RANGES.require(body)
    if body.top_logprobs and not body.with_logprobs:
        reason = f"top_logprobs needs include: [{_LOGPROBS!r}]"
        raise BadRequestError(reason, param="top_logprobs")
    unknown = set(body.include or ()) - set(_INCLUDES)
    if unknown:
        raise UnsupportedError(f"include: {min(unknown)!r} is not supported here", param="include")


_Items = tuple[ChatMessage | ItemReference, ...]


def _conversation(body: ResponseRequest) -> tuple[tuple[ChatMessage, ...], _Items]:
    """Return the new messages, or the items if any of them is a reference."""
    new = read_items(body.input)
    if not new or (new == (ChatMessage("user", ""),)):
        raise BadRequestError("input: at least one item is needed", param="input")
    last = new[-1]
    refuse_prefill((ChatMessage("assistant") if isinstance(last, ItemReference) else last,), "input")
    system = (ChatMessage("system", body.instructions),) if body.instructions else ()
    messages = [item for item in new if isinstance(item, ChatMessage)]
    if len(messages) < len(new):
        return (), (*system, *new)
    return (*system, *merged(messages)), ()


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
            raise BadRequestError(f"{param}: {error}", param=param) from error
    return tuple(read)


def response_base(body: ResponseRequest, completion_id: str, created_unix_s: int) -> dict[str, Any]:
    """Return a response in progress, without output."""
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


def response_answer(
    body: ResponseRequest, completion: Completion, token_text: TokenText
) -> dict[str, Any]:
    """Return the whole response."""
    choice = completion.choices[0]
    is_cut = choice.stop_reason is StopReason.LENGTH
    opening = completion.opening
    return {
        **response_base(body, opening.completion_id, opening.created_unix_s),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(choice, token_text, with_logprobs=body.with_logprobs),
        "usage": _usage(completion),
    }


def _usage(completion: Completion) -> dict[str, Any]:
    """Return the token counts; reasoning tokens are not counted separately."""
    prompt, sampled = completion.num_prompt_tokens, completion.num_sampled
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": completion.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


class ResponseStream:
    """`StreamDialect` of responses. One item is open at a time; tool calls follow whole at the end."""

    def __init__(self, body: ResponseRequest, token_text: TokenText) -> None:
        self._body = body
        self._token_text = token_text
        self._number = 0
        self._index = -1  # index of the newest item
        self._open = ""  # type of the open item; empty if none is open
        self._text = ""  # text of the open item
        self._suffix = ""
        self._name = ""  # of the open item, in its id
        self._kinds: set[str] = set()  # types of the items so far

    def begin(self, opening: CallStart) -> bytes:
        """Encode the response without output."""
        self._suffix = opening.completion_id
        response = response_base(self._body, opening.completion_id, opening.created_unix_s)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(self, piece: Piece) -> bytes:
        """Encode new reasoning and text."""
        events = b""
        if piece.delta.reasoning:
            events += self._more("reasoning", piece.delta.reasoning)
        if piece.delta.content:
            events += self._more("message", piece.delta.content)
        return events

    def choice(self, choice: ReplyChoice) -> bytes:
        """Close the open item, then encode the tool calls; without any there is a message."""
        calls = choice.message.tool_calls
        needs_message = not calls and "message" not in self._kinds
        events = self._ensure_open("message") if needs_message else b""
        return events + self._close_item() + b"".join(map(self._call, calls))

    def end(self, completion: Completion) -> bytes:
        """Encode the whole response."""
        is_cut = completion.choices[0].stop_reason is StopReason.LENGTH
        kind = "response.incomplete" if is_cut else "response.completed"
        return self._event(kind, response=response_answer(self._body, completion, self._token_text))

    def error(self, error: ApiError) -> bytes:
        """Encode an error event, which the client raises."""
        param = error.param or None
        raised = openai_error(error)  # the client raises for its key `error` alone
        return self._event("error", code=error.code, message=error.message, param=param, **raised)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(event)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Encode an event of the open item's content."""
        prefix = "rs" if self._open == "reasoning" else "msg"
        return self._event(
            kind,
            item_id=f"{prefix}_{self._name}",
            output_index=self._index,
            content_index=0,
            **fields,
        )

    def _more(self, kind: str, text: str) -> bytes:
        """Encode text of this type without the line break that parts it from an earlier item."""
        is_parted = kind in self._kinds and self._open != kind
        events = self._ensure_open(kind)
        return events + self._delta(text.removeprefix("\n") if is_parted else text)

    def _ensure_open(self, kind: str) -> bytes:
        """Open an item of this type unless it is open."""
        if self._open == kind:
            return b""
        events = self._close_item()
        self._index, self._open, self._text = self._index + 1, kind, ""
        self._name = f"{self._suffix}_{self._index}" if kind in self._kinds else self._suffix
        self._kinds.add(kind)
        item = self._item("in_progress")
        events += self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "message":
            events += self._of_item("response.content_part.added", part=text_part(""))
        return events

    def _delta(self, text: str) -> bytes:
        self._text += text
        if self._open == "reasoning":
            return self._of_item("response.reasoning_text.delta", delta=text)
        return self._of_item("response.output_text.delta", delta=text, logprobs=[])

    def _close_item(self) -> bytes:
        if not self._open:
            return b""
        if self._open == "reasoning":
            events = self._of_item("response.reasoning_text.done", text=self._text)
        else:
            events = self._of_item("response.output_text.done", text=self._text, logprobs=[])
            events += self._of_item("response.content_part.done", part=text_part(self._text))
        item = self._item("completed")
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = ""
        return events

    def _item(self, status: str) -> dict[str, Any]:
        """Return the open item with its text so far."""
        if self._open == "reasoning":
            return reasoning_item(self._name, self._text, status)
        parts = [text_part(self._text)] if status == "completed" else []
        return message_item(self._name, parts, status)

    def _call(self, call: ToolCall) -> bytes:
        self._index += 1
        place = {"output_index": self._index}
        begun = call_item(ToolCall(call.id, call.name, ""), "in_progress")
        events = self._event("response.output_item.added", item=begun, **place)
        place_of_item = {"item_id": begun["id"], **place}
        kind = "response.function_call_arguments"
        events += self._event(f"{kind}.delta", delta=call.arguments, **place_of_item)
        events += self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **place_of_item)
        return events + self._event("response.output_item.done", item=call_item(call), **place)
