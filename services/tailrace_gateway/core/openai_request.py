"""Shared parts of OpenAI requests: sampling fields, messages, tools, output constraints."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.body import Body, Content, DefaultOnly, NumberRanges, stop_strings, text_of
from tailrace_gateway.core.call import OutputConstraints, ReplyFormat, SamplingOverrides
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_gateway.core.output_constraints import ToolChoice, tool_constraints
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

MAX_CHOICES = 128

_NO_OVERRIDES = SamplingOverrides()
_DEFAULT_ONLY = DefaultOnly(frequency_penalty=(0,), presence_penalty=(0,), logit_bias=({},))
_RANGES = NumberRanges(
    max_tokens=(1, 1 << 31),
    n=(1, MAX_CHOICES),
    temperature=(0, 100),
    top_p=(1e-6, 1),
    top_k=(-1, 1 << 30),
    min_p=(0, 1),
    seed=(-(1 << 63), (1 << 63) - 1),
)


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class OpenAIRequest(Body, frozen=True, kw_only=True):
    """Fields of requests for one or more samples. Fields of the second group are accepted only without
    effect."""

    model: str = ""
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Metadata of the client without effect on a reply.
    user: str | None = None

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def require_shared(self) -> None:
        """Raise `BadRequestError` for a value that the gateway does not support."""
        _DEFAULT_ONLY.require(self)
        _RANGES.require(self)

    def overrides(self) -> SamplingOverrides:
        """Return the requested sampling parameters; `top_k` -1 means no limit, as in vLLM."""
        given = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.stop)
        if given == (None,) * 6:
            return _NO_OVERRIDES
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=stop_strings(self.stop),
        )


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class InFunction(msgspec.Struct, frozen=True):
    """Function of a tool call."""

    name: str
    arguments: str = "{}"


class InToolCall(msgspec.Struct, frozen=True):
    """Tool call of a message in the history."""

    id: str
    function: InFunction


class InMessage(msgspec.Struct, frozen=True):
    """Message of the history. The gateway ignores fields without meaning that clients echo."""

    role: str
    content: Content = None
    tool_calls: list[InToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    function_call: Any = None
    audio: Any = None


class InSchema(msgspec.Struct, frozen=True):
    """Function that the model may call. `strict` is accepted and not enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InTool(msgspec.Struct, frozen=True):
    """Tool in the format of chat completions."""

    type: str
    function: InSchema | None = None


def read_messages(messages: Sequence[InMessage]) -> tuple[ChatMessage, ...]:
    """Return the conversation; it must not end with an assistant message."""
    if not messages:
        raise BadRequestError("messages: at least one is needed", param="messages")
    read = tuple([_message(message, index) for index, message in enumerate(messages)])
    refuse_prefill(read)
    return read


def refuse_prefill(messages: Sequence[ChatMessage], param: str = "messages") -> None:
    """Refuse a final assistant message: the gateway never continues a reply as text."""
    if messages and messages[-1].role == "assistant":
        raise UnsupportedError(
            f"{param}: the last message is the assistant's; the gateway does not continue a reply",
            param=param,
        )


def _message(message: InMessage, index: int) -> ChatMessage:
    role, content = ROLES.get(message.role), message.content
    if role is None or message.function_call or message.audio:
        raise _refusal(message, f"messages[{index}]")
    if not isinstance(content, str):
        content = text_of(content, f"messages[{index}].content")
    if role == "assistant":
        return _assistant_message(message, content)
    if role == "tool" and not message.tool_call_id:
        param = f"messages[{index}].tool_call_id"
        raise BadRequestError(f"{param} is missing in a message of the role tool", param=param)
    return ChatMessage(role, content, tool_call_id=message.tool_call_id or "", name=message.name or "")


def _assistant_message(message: InMessage, content: str) -> ChatMessage:
    """Return an assistant message with its tool calls and reasoning."""
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    ]
    reasoning = message.reasoning_content or message.reasoning
    return ChatMessage(
        "assistant",
        content,
        tuple(calls),
        name=message.name or "",
        reasoning=reasoning if isinstance(reasoning, str) else "",
    )


def _refusal(message: InMessage, place: str) -> BadRequestError:
    if message.role not in ROLES:
        reason = f"{place}.role: {message.role!r} is not one of {', '.join(ROLES)}"
        return BadRequestError(reason, param=f"{place}.role")
    param = f"{place}.{'function_call' if message.function_call else 'audio'}"
    return UnsupportedError(f"{param} is not supported", param=param)


def read_tools(tools: Sequence[InTool] | None) -> tuple[ToolSchema, ...]:
    """Return the functions that the model may call."""
    read = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function" or tool.function is None:
            param = f"tools[{index}].type"
            raise UnsupportedError(
                f"{param}: only functions are supported, not {tool.type!r}", param=param
            )
        read.append(schema_of(tool.function))
    return tuple(read)


def schema_of(function: InSchema) -> ToolSchema:
    """Return a function's schema; without `parameters` the function takes none."""
    nothing = {"type": "object", "properties": {}}
    return ToolSchema(function.name, function.description or "", function.parameters or nothing)


_NOTHING = OutputConstraints()
_CHOICES = {
    None: ToolChoice("auto"),
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("any"),
}


def read_constraints(
    choice: Any,
    parallel: bool | None,
    tools: Sequence[ToolSchema],
    wanted: dict[str, Any] | None,
    param: str = "response_format",
) -> OutputConstraints:
    """Read `tool_choice`, `parallel_tool_calls` and the response format; `param` names the format's
    field."""
    if choice is None and parallel is None and wanted is None:
        return _NOTHING
    constraints = tool_constraints(_read_choice(choice), tools, is_parallel=parallel is not False)
    reply_format, schema = _read_format(wanted or {}, param)
    return msgspec.structs.replace(constraints, reply_format=reply_format, json_schema=schema)


def _read_choice(choice: Any) -> ToolChoice:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")  # the responses dialect puts the name beside the type
        name = (function if isinstance(function, dict) else choice).get("name")
        return ToolChoice("tool", name if isinstance(name, str) else "")
    known = _CHOICES.get(choice) if choice is None or isinstance(choice, str) else None
    if known is None:
        raise UnsupportedError(f"tool_choice: {choice!r} is not supported", param="tool_choice")
    return known


def _read_format(wanted: dict[str, Any], param: str) -> tuple[ReplyFormat, dict[str, Any] | None]:
    """Return the format and its schema, which may be nested or flat."""
    kind = wanted.get("type", "text")
    if kind == "text":
        return ReplyFormat.TEXT, None
    if kind == "json_object":
        return ReplyFormat.JSON_OBJECT, None
    if kind != "json_schema":
        raise UnsupportedError(f"{param}: type {kind!r} is not supported", param=param)
    nested = wanted.get("json_schema")
    schema = (nested if isinstance(nested, dict) else wanted).get("schema")
    if not isinstance(schema, dict):
        raise BadRequestError(f"{param}: the schema is missing", param=param)
    return ReplyFormat.JSON_SCHEMA, schema
