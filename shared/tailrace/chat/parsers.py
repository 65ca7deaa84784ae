"""Selection of the parsers of replies: keys `chat.tool_parser` and `chat.reasoning_parser`.

A value is `auto`, a built-in name, or `module:Class` of a user's file.
"""

import difflib
from collections.abc import Collection
from typing import NamedTuple

from tailrace.chat.own_parsers import load_reasoning_parser, load_tool_parser
from tailrace.chat.reasoning import REASONING_PARSERS, ReasoningParser
from tailrace.chat.special import SpecialTokens
from tailrace.chat.template import ChatTemplate
from tailrace.chat.tool_parsers import TOOL_PARSERS, ToolParser
from tailrace.config import ConfigError
from tailrace.config.chat import ChatArgs

_TOOL_KEY, _REASONING_KEY = "chat.tool_parser", "chat.reasoning_parser"


class ReplyParsers(NamedTuple):
    """Configured parsers; None stands for `auto`."""

    tool: ToolParser | None
    reasoning: ReasoningParser | None

    def selected(
        self, template: ChatTemplate, special: SpecialTokens
    ) -> tuple[ToolParser, ReasoningParser]:
        """Replaces `auto` by the parsers that fit the template and the tokenizer's tokens."""
        tool = self.tool or _tool_parser_of(template)
        needed = REASONING_PARSERS.get(tool.reasoning_parser)
        reasoning = self.reasoning or needed
        return tool, reasoning or _reasoning_parser_of(template.source, special.texts.values())


def load_parsers(chat: ChatArgs) -> ReplyParsers:
    """Loads the configured parsers.

    Raises `ConfigError` for an unknown name, a user's class that is not a parser, or a tool parser that
    needs another reasoning parser.
    """
    check_parser_names(chat)
    tool = None
    if ":" in chat.tool_parser:
        tool = load_tool_parser(chat.tool_parser, _TOOL_KEY)
        _check_pair(chat, tool)
    reasoning = None
    if ":" in chat.reasoning_parser:
        reasoning = load_reasoning_parser(chat.reasoning_parser, _REASONING_KEY)
    return ReplyParsers(
        tool or TOOL_PARSERS.get(chat.tool_parser),
        reasoning or REASONING_PARSERS.get(chat.reasoning_parser),
    )


def check_parser_names(chat: ChatArgs) -> None:
    """Raises `ConfigError` for unknown names and pairs that do not fit; imports no user file."""
    _check_name(_TOOL_KEY, chat.tool_parser, TOOL_PARSERS)
    _check_name(_REASONING_KEY, chat.reasoning_parser, REASONING_PARSERS)
    if chat.tool_parser in TOOL_PARSERS:
        _check_pair(chat, TOOL_PARSERS[chat.tool_parser])


def _check_name(key: str, name: str, known: Collection[str]) -> None:
    names = ("auto", *known)
    if ":" in name or name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"use {', '.join(names)}, or module:Class"
    raise ConfigError(f"{key}: unknown parser {name!r}; {remedy}")


def _check_pair(chat: ChatArgs, tool: ToolParser) -> None:
    needed = tool.reasoning_parser
    if needed and chat.reasoning_parser not in ("auto", needed):
        raise ConfigError(
            f"{_TOOL_KEY} {chat.tool_parser} needs the reasoning parser {needed}: set "
            f"{_REASONING_KEY} to {needed} or auto"
        )


def _tool_parser_of(template: ChatTemplate) -> ToolParser:
    """Returns the parser of the format in which the template renders a call."""
    for parser in TOOL_PARSERS.values():
        if parser.template_call is not None and parser.template_call.search(template.call_text):
            return parser
    return TOOL_PARSERS["none"]


def _reasoning_parser_of(source: str, token_texts: Collection[str]) -> ReasoningParser:
    for parser in REASONING_PARSERS.values():
        if parser.recognizes(source, token_texts):
            return parser
    return REASONING_PARSERS["none"]
