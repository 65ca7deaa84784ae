"""Anthropic's messages dialect: requests, responses, streams and errors.

Content blocks of the history become messages. The text blocks of an assistant message form its content,
and its `tool_use` blocks its tool calls. Each `tool_result` of a user message becomes a message of its
own. Only text is supported. The gateway does not enforce a thinking budget; `thinking: disabled` omits
thinking blocks from the response.
"""

import hashlib
from typing import Any

import msgspec

from tailrace_gateway.core.anthropic_blocks import (
    Blocks,
    InAnthropicMessage,
    read_anthropic_messages,
    read_system,
)
from tailrace_gateway.core.body import Body, DefaultOnly, NumberRanges, read_body, stop_strings
from tailrace_gateway.core.call import (
    CallStart,
    Completion,
    ModelCall,
    Piece,
    ReplyChoice,
    SamplingOverrides,
    StopReason,
)
from tailrace_gateway.core.errors import (
    ApiError,
    BadRequestError,
    ContextOverflowError,
    NoThreadsError,
    UnsupportedError,
)
from tailrace_gateway.core.openai_request import refuse_prefill, template_args, with_format
from tailrace_gateway.core.output_constraints import ToolChoice, tool_constraints
from tailrace_gateway.core.sse import named_event, to_json
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

_STOP_REASONS = {
    StopReason.STOP: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.TOOL_CALLS: "tool_use",
}
_KEEPS_THOUGHTS = [
    {"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})
]
_DEFAULT_ONLY = DefaultOnly(
    container=(),
    context_management=({}, {"edits": []}, *({"edits": [edit]} for edit in _KEEPS_THOUGHTS)),
    mcp_servers=([],),
    output_format=(),
)
_RANGES = NumberRanges(
    max_tokens=(1, 1 << 31), temperature=(0, 100), top_p=(1e-6, 1), top_k=(0, 1 << 30)
)


class AnthropicTool(msgspec.Struct, frozen=True):
    """Tool of the caller; tools that Anthropic runs have another `type`."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class OutputConfig(Body, frozen=True, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(Body, frozen=True, kw_only=True):
    """Body of a messages request. Fields of the last group have no effect on a reply."""

    messages: list[InAnthropicMessage]
    model: str = ""
    max_tokens: int | None = None
    system: str | Blocks | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    thread: Any = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    speed: str | None = None
    cache_control: Any = None

    @property
    def with_reasoning(self) -> bool:
        """True if the response includes thinking blocks."""
        return (self.thinking or {}).get("type") != "disabled"


def read_messages_request(raw: bytes) -> tuple[MessagesRequest, ModelCall]:
    """Parse a request; return its body and its model call. Raise `BadRequestError`."""
    body = read_body(raw, MessagesRequest)
    if body.max_tokens is None:
        raise BadRequestError("max_tokens: Field required", param="max_tokens")
    call = call_of(body)
    refuse_prefill(call.messages)
    return body, call


def read_count_request(raw: bytes) -> ModelCall:
    """Parse a request that counts the tokens of a prompt."""
    return call_of(read_body(raw, MessagesRequest))


def call_of(body: MessagesRequest) -> ModelCall:
    """Return the model call of a body."""
    _DEFAULT_ONLY.require(body)
    _RANGES.require(body)
    if body.thread is not None:
        raise NoThreadsError
    tools = _tools(body.tools or [])
    system = read_system(body.system)
    first = (ChatMessage("system", system),) if system else ()
    return ModelCall(
        messages=(*first, *read_anthropic_messages(body.messages)),
        tools=tools,
        finds_calls=(body.tool_choice or {}).get("type") != "none",
        template_args=template_args(
            body.chat_template_kwargs,
            body.output_config.effort if body.output_config else None,
            "output_config.effort",
        ),
        max_new_tokens=body.max_tokens,
        sampling=SamplingOverrides(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=stop_strings(body.stop_sequences, "stop_sequences"),
        ),
        constraints=with_format(
            tool_constraints(
                _choice(body.tool_choice or {}),
                tools,
                is_parallel=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
            ),
            (body.output_config and body.output_config.format) or {},
            "output_config.format",
        ),
    )


def _tools(tools: list[AnthropicTool]) -> tuple[ToolSchema, ...]:
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{index}].type"
            raise UnsupportedError(f"{param}: {tool.type!r} runs at Anthropic, not here", param=param)
    nothing = {"type": "object", "properties": {}}
    return tuple(
        ToolSchema(tool.name, tool.description or "", tool.input_schema or nothing) for tool in tools
    )


def _choice(choice: dict[str, Any]) -> ToolChoice:
    match choice.get("type", "auto"):
        case "tool":
            return ToolChoice("tool", str(choice.get("name", "")))
        case "auto" | "any" | "none" as kind:
            return ToolChoice(kind)
        case other:
            raise UnsupportedError(f"tool_choice: type {other!r} is not supported", param="tool_choice")


def messages_answer(body: MessagesRequest, completion: Completion) -> dict[str, Any]:
    """Return the response to a request without a stream."""
    choice = completion.choices[0]
    return {
        "id": completion.opening.completion_id,
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": blocks_of(body, choice),
        **stop_fields(choice),
        "usage": usage_of(completion),
    }


def blocks_of(body: MessagesRequest, choice: ReplyChoice) -> list[dict[str, Any]]:
    """Return the content blocks of a reply."""
    message = choice.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning and body.with_reasoning:
        text = message.reasoning
        blocks.append({"type": "thinking", "thinking": text, "signature": signature_of(text)})
    if message.content or not (blocks or message.tool_calls):
        blocks.append({"type": "text", "text": message.content})
    return [
        *blocks,
        *(tool_use_block(call.id, call.name, call.arguments) for call in message.tool_calls),
    ]


def signature_of(thinking: str) -> str:
    """Return the signature of a thinking block: clients send blocks back only if they have one."""
    return hashlib.blake2b(thinking.encode(), digest_size=32).hexdigest()


def tool_use_block(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call; arguments that are no JSON object go under the key `_raw`."""
    try:
        given: Any = msgspec.json.decode(arguments.encode())
    except msgspec.DecodeError:
        given = None
    shown = given if isinstance(given, dict) else {"_raw": arguments}
    return {"type": "tool_use", "id": call_id, "name": name, "input": shown}


def stop_fields(choice: ReplyChoice) -> dict[str, Any]:
    """Return the fields for the stop reason."""
    if choice.stop_matched is not None and choice.stop_reason is StopReason.STOP:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_matched}
    return {"stop_reason": _STOP_REASONS[choice.stop_reason], "stop_sequence": None}


def usage_of(completion: Completion) -> dict[str, Any]:
    """Return the token counts; `input_tokens` excludes tokens read from the cache."""
    cached = completion.num_cached_tokens
    return {
        "input_tokens": completion.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion.num_sampled,
    }


class MessagesStream:
    """`StreamDialect` of messages. One block is open at a time; tool calls follow whole at the end."""

    def __init__(self, body: MessagesRequest) -> None:
        self._body = body
        self._index = -1  # index of the newest block
        self._open = ""  # type of the open block; empty if none is open
        self._stop: dict[str, Any] = {}
        self._thinking = ""
        self._kinds: set[str] = set()  # types of the blocks of text so far

    def begin(self, opening: CallStart) -> bytes:
        """Encode the message without content."""
        usage = {"input_tokens": opening.num_prompt_tokens, "output_tokens": 0}
        message: dict[str, Any] = {
            "id": opening.completion_id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_event({"type": "message_start", "message": message})

    def piece(self, piece: Piece) -> bytes:
        """Encode new reasoning and text."""
        events = b""
        if piece.delta.reasoning and self._body.with_reasoning:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            thinking = self._parted("thinking", piece.delta.reasoning)
            delta = {"type": "thinking_delta", "thinking": thinking}
            self._thinking += thinking
            events += self._block("thinking", empty) + self._delta(delta)
        if piece.delta.content:
            delta = {"type": "text_delta", "text": self._parted("text", piece.delta.content)}
            events += self._block("text", {"type": "text", "text": ""}) + self._delta(delta)
        return events

    def _parted(self, kind: str, text: str) -> str:
        """Return text of this type without the line break that parts it from an earlier block."""
        is_parted = kind in self._kinds and self._open != kind
        self._kinds.add(kind)
        return text.removeprefix("\n") if is_parted else text

    def choice(self, choice: ReplyChoice) -> bytes:
        """Encode the tool calls, and close the last block."""
        self._stop = stop_fields(choice)
        calls = choice.message.tool_calls
        events = b"".join(map(self._tool_use, calls))
        if self._index < 0:
            events += self._block("text", {"type": "text", "text": ""})
        return events + self._close()

    def end(self, completion: Completion) -> bytes:
        """Encode the stop reason and the token counts."""
        delta = {"type": "message_delta", "delta": self._stop, "usage": usage_of(completion)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        """Encode an error event, which the client raises."""
        return named_event(anthropic_error(error))

    def _tool_use(self, call: ToolCall) -> bytes:
        block = tool_use_block(call.id, call.name, call.arguments)
        arguments = to_json(block["input"]).decode()
        begun = self._close() + self._block("tool_use", {**block, "input": {}})
        return begun + self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Open a block of this type unless it is open."""
        if self._open == kind:
            return b""
        events = self._close()
        self._index += 1
        self._open = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": empty}
        return events + named_event(start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature_of(self._thinking)})
        self._open = ""
        return signed + named_event({"type": "content_block_stop", "index": self._index})


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response; `code` and `param` are for programs."""
    message = error.message
    if isinstance(error, ContextOverflowError):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit_tokens} maximum"
    content: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error"),
        "message": message,
        "code": error.code,
    }
    if error.param:
        content["param"] = error.param
    if isinstance(error, NoThreadsError):
        content["details"] = error.details
    completion_id = getattr(error, "completion_id", "")
    if completion_id:
        content["completion_id"] = completion_id
    return {"type": "error", "error": content}
