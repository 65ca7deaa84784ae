"""Chat template of a model: Jinja in a sandbox, with the functions and filters that templates expect.

Templates come with models, so they are foreign code: the sandbox is immutable, and errors of a template
become a `TemplateError` that names it. `strftime_now` is undefined on purpose: templates then use a
fixed date, so that a prompt does not depend on the day.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_PROBE_KEY, _PROBE_VALUE = "sentinel_key", "SentinelArgument"


class TemplateError(ValueError):
    """A chat template cannot be used. Attributes: `template` (its origin), `reason`."""

    def __init__(self, template: str, reason: str) -> None:
        super().__init__(f"chat template {template}: {reason}")
        self.template = template
        self.reason = reason


class _GenerationBlock(jinja2.ext.Extension):
    """Block `{% generation %}`, which marks assistant text in some templates; renders as its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled template with its variables (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, names: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.source = source
        self._names = dict(names)
        try:
            self._template = _environment().from_string(source)
            # Jinja copies these for every rendering: 16 microseconds as a ChainMap, 1 as a dict.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise TemplateError(name, f"does not compile: {error}") from error

    def with_names(self, names: Mapping[str, Any]) -> "ChatTemplate":
        """Returns the same template with further variables, or other values of its variables."""
        return ChatTemplate(self.source, {**self._names, **names}, self.name)

    def read_by(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the variables that the template reads and that differ from its own."""
        return {
            name: value
            for name, value in names.items()
            if name in self._variables and (name not in self._names or self._names[name] != value)
        }

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Renders a conversation to the text that the model reads."""
        return self._render(messages, tools, add_generation_prompt, self.takes_argument_text)

    @cached_property
    def call_text(self) -> str:
        """Call of a tool `probe` as the template renders it; empty: it renders no tool calls."""
        return self._probe(self.takes_argument_text)

    @cached_property
    def takes_argument_text(self) -> bool:
        """True if arguments of tool calls must be JSON text instead of an object."""
        return not self._probe(False) and bool(self._probe(True))

    def _probe(self, arguments_as_text: bool) -> str:
        """Renders a tool call; empty if the template fails or misreads the arguments."""
        call = ToolCall("sentinel1", "probe", json.dumps({_PROBE_KEY: _PROBE_VALUE}))
        messages = [ChatMessage("user", "go"), ChatMessage("assistant", tool_calls=(call,))]
        try:
            text = self._render(messages, (), False, arguments_as_text)
        except TemplateError:
            return ""
        is_repr, is_quoted_twice = f"{{'{_PROBE_KEY}'" in text, f'{_PROBE_VALUE}\\"' in text
        return "" if _PROBE_VALUE not in text or is_repr or is_quoted_twice else text

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        add_generation_prompt: bool,
        arguments_as_text: bool,
    ) -> str:
        try:
            return self._template.render(
                messages=template_messages(messages, arguments_as_text=arguments_as_text),
                add_generation_prompt=add_generation_prompt,
                tools=template_tools(tools),
                documents=None,
                **self._names,
            )
        except _TEMPLATE_FAILURES as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(self.name, f"cannot render [{roles}]: {error}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts to JSON for prompts; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def template_messages(
    messages: Sequence[ChatMessage], *, arguments_as_text: bool
) -> list[dict[str, Any]]:
    """Converts messages to dicts; a tool's answer without the tool's name gets it from the call."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        made.append(_template_message(message, names, arguments_as_text))
    return made


def template_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
    """Converts tools to OpenAI functions; None without tools, because templates test for None."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def _template_message(
    message: ChatMessage, names: dict[str, str], arguments_as_text: bool
) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = list(_template_calls(message.tool_calls, arguments_as_text))
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
        if not (message.tool_calls and message.content):  # harmony has one place for both
            made["thinking"] = message.reasoning
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        made["name"] = name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def _template_calls(calls: Iterable[ToolCall], arguments_as_text: bool) -> Iterable[dict[str, Any]]:
    for call in calls:
        arguments = call.arguments if arguments_as_text else _parsed(call.arguments)
        yield {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }


def _parsed(arguments: str) -> Any:
    """Parses arguments to an object; other text stays unchanged."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
