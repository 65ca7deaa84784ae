"""Shared parts of OpenAI requests: choices, messages, tools, output constraints."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.body import Body, Content, DefaultOnly, NumberRanges, text_of
from tailrace_gateway.core.call import OutputConstraints, ReplyFormat
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_gateway.core.openai_sampling import SampledRequest
from tailrace_gateway.core.output_constraints import NO_CONSTRAINTS, ToolChoice, tool_constraints
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

MAX_CHOICES = 128

_DEFAULT_ONLY = DefaultOnly(
    length_penalty=(1,),
    min_tokens=(0,),
    use_beam_search=(False,),
    best_of=(1,),
    echo=(False,),
    bad_words=([],),
    add_special_tokens=(False,),
    return_tokens_as_token_ids=(False,),
    return_prompt_text=(False,),
    truncate_prompt_tokens=(),
    thinking_token_budget=(-1,),
    repetition_detection=(),
    prompt_logprobs=(),
    logprob_token_ids=([],),
    allowed_token_ids=(),
    logits_processors=([],),
    guided_json=(),
    guided_regex=(),
    guided_choice=(),
    guided_grammar=(),
)
# Template variables that the gateway sets itself.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERBOSITIES = ("low", "medium", "high")
_RANGES = NumberRanges(max_tokens=(1, 1 << 31), n=(1, MAX_CHOICES))


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM; accepted only without effect


class OpenAIRequest(SampledRequest, frozen=True, kw_only=True):
    """Fields of requests for one or more samples. Fields of the second group, most of them vLLM's, are
    accepted only without effect."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    length_penalty: float | None = None
    min_tokens: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None
    # No effect here: text tokens have no spaces to add, prompts are not cut, a stream sends tokens when
    # they come, and offsets and experts are not returned.
    spaces_between_special_tokens: bool | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: int | None = None

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
        self.require_sampling()
        _DEFAULT_ONLY.require(self)
        _RANGES.require(self)
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            name = "stream_options.continuous_usage_stats"
            raise UnsupportedError(
                f"{name}: True is not supported here: include_usage gives the counts at the end",
                param=name,
            )


def template_args(
    given: Mapping[str, Any] | None,
    effort: str | None,
    param: str = "reasoning_effort",
    verbosity: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of the chat template. An effort of `none` also switches thinking off where
    the template can; `param` is the field of the effort."""
    args: dict[str, Any] = {}
    if effort is not None:
        _require_one_of(_EFFORTS, effort, param)
        args = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
    if verbosity is not None:
        _require_one_of(_VERBOSITIES, verbosity, "verbosity")
        args["verbosity"] = verbosity
    for name in _OWN_VARIABLES.intersection(given or {}):
        place = f"chat_template_kwargs.{name}"
        raise BadRequestError(f"{place}: the gateway sets this variable itself", param=place)
    return {**args, **(given or {})}


def _require_one_of(known: Sequence[str], value: str, param: str) -> None:
    if value not in known:
        raise BadRequestError(f"{param}: {value!r} is not one of {', '.join(known)}", param=param)


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
        ToolCall(call.id, call.function.name, call.function.arguments or "{}")
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
    return msgspec.structs.replace(
        constraints, reply_format=reply_format, json_schema=schema, format_param=param
    )


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
