"""Shared parts of OpenAI requests: sampling fields, messages, tools, output constraints."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from tailrace_gateway.core.body import Body, Content, DefaultOnly, NumberRanges, stop_strings, text_of
from tailrace_gateway.core.call import OutputConstraints, ReplyFormat, SamplingOverrides
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_gateway.core.output_constraints import NO_CONSTRAINTS, ToolChoice, tool_constraints
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

MAX_CHOICES = 128

_NO_OVERRIDES = SamplingOverrides()
_DEFAULT_ONLY = DefaultOnly(
    frequency_penalty=(0,),
    presence_penalty=(0,),
    logit_bias=({},),
    repetition_penalty=(1,),
    length_penalty=(1,),
    min_tokens=(0,),
    ignore_eos=(False,),
    use_beam_search=(False,),
    best_of=(1,),
    echo=(False,),
    bad_words=([],),
    include_stop_str_in_output=(False,),
    skip_special_tokens=(True,),
    add_special_tokens=(False,),
    return_tokens_as_token_ids=(False,),
    truncate_prompt_tokens=(),
    prompt_logprobs=(),
    allowed_token_ids=(),
    logits_processors=([],),
    structured_outputs=({},),
    guided_json=(),
    guided_regex=(),
    guided_choice=(),
    guided_grammar=(),
)
# Template variables that the gateway sets itself.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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
    """Fields of requests for one or more samples. Fields of the second group, most of them vLLM's, are
    accepted only without effect."""

    model: str = ""
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None
    # No effect here: a run has one model and one queue, and its text tokens have no spaces to add.
    spaces_between_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
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
        given = _overrides_of(self)
        if given == _NO_VALUES:
            return _NO_OVERRIDES
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids")
_NO_VALUES = (None,) * len(_NAMES)
_overrides_of = attrgetter(*_NAMES)


def template_args(
    given: Mapping[str, Any] | None, effort: str | None, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return the arguments of the chat template. An effort of `none` also switches thinking off where
    the template can."""
    args: dict[str, Any] = {}
    if effort is not None:
        if effort not in _EFFORTS:
            reason = f"{param}: {effort!r} is not one of {', '.join(_EFFORTS)}"
            raise BadRequestError(reason, param=param)
        args = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
    for name in _OWN_VARIABLES.intersection(given or {}):
        place = f"chat_template_kwargs.{name}"
        raise BadRequestError(f"{place}: the gateway sets this variable itself", param=place)
    return {**args, **(given or {})}


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
    read = conversation_of(messages, "messages")
    refuse_prefill(read)
    return read


def conversation_of(messages: Sequence[InMessage], place: str) -> tuple[ChatMessage, ...]:
    """Return a conversation that may end with any message."""
    return tuple([_message(message, f"{place}[{index}]") for index, message in enumerate(messages)])


def refuse_prefill(messages: Sequence[ChatMessage], param: str = "messages") -> None:
    """Refuse a final assistant message: the gateway never continues a reply as text."""
    if messages and messages[-1].role == "assistant":
        raise UnsupportedError(
            f"{param}: the last message is the assistant's; the gateway does not continue a reply",
            param=param,
        )


def _message(message: InMessage, place: str) -> ChatMessage:
    role, content = ROLES.get(message.role), message.content
    if role is None or message.function_call or message.audio:
        raise _refusal(message, place)
    if not isinstance(content, str):
        content = text_of(content, f"{place}.content")
    if role == "assistant":
        return _assistant_message(message, content)
    if role == "tool" and not message.tool_call_id:
        param = f"{place}.tool_call_id"
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
        return NO_CONSTRAINTS
    constraints = tool_constraints(read_choice(choice), tools, is_parallel=parallel is not False)
    return with_format(constraints, wanted or {}, param)


def with_format(
    constraints: OutputConstraints, wanted: dict[str, Any], param: str
) -> OutputConstraints:
    """Return the constraints with the requested format of the reply, which the field `param` names."""
    reply_format, schema = _read_format(wanted, param)
    if reply_format is ReplyFormat.TEXT:
        return constraints
    return msgspec.structs.replace(constraints, reply_format=reply_format, json_schema=schema)


def read_choice(choice: Any) -> ToolChoice:
    """Return the requested use of tools; raise `UnsupportedError` for an unknown one."""
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
