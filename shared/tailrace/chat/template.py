"""A model's chat template: Jinja in a sandbox, with what templates expect to find around them.

Templates come with models, so they are foreign code: the sandbox is immutable, and what a template
raises becomes a `TemplateError` that names the template. `strftime_now` is left undefined on purpose:
templates fall back to a fixed date then, and a prompt does not depend on the day it was rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tailrace_protos.chat import ChatMessage


class TemplateError(ValueError):
    """A chat template cannot be used. Attributes: `template` (where it came from), `reason`."""

    def __init__(self, template: str, reason: str) -> None:
        super().__init__(f"chat template {template}: {reason}")
        self.template = template
        self.reason = reason


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text in some templates; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        self.name = name
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(name, f"does not compile: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The conversation as the text that the model reads."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(self.name, f"cannot render [{roles}]: {error}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON for prompts: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
