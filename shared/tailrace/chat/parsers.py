"""Selection of the parsers of replies: keys `chat.tool_parser` and `chat.reasoning_parser`.

A value is `auto`, a built-in name, or `module:Class` of a user's file.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tailrace.chat.model_files import SpecialTokens
from tailrace.chat.reasoning import (
    REASONING_PARSERS,
    ReasoningParser,
    ReasoningSplitter,
    Split,
    ThoughtMarks,
)
from tailrace.chat.template import ChatTemplate
from tailrace.chat.tool_parsers import TOOL_PARSERS, CallForm, ParsedCalls, ToolParser
from tailrace.config import ConfigError
from tailrace.config.run import ChatArgs
from tailrace.config.suggestions import closest
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace.log import get_logger
from tailrace_protos.chat import ToolSchema

R = TypeVar("R")
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
    near = closest(name, names)
    remedy = f"did you mean {near!r}?" if near else f"use {', '.join(names)}, or module:Class"
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


log = get_logger(__name__)

_PLAIN_REPLY = "A reply without calls."


def load_tool_parser(path: str, key: str) -> ToolParser:
    """Makes a user's tool parser; `ConfigError` names `key`, the error and the remedy."""
    parser = _made(path, key, ToolParser, "parse(self, text, tools)")
    assert isinstance(parser, ToolParser)
    _check_special_texts(parser, path, key)
    if parser.reasoning_parser and parser.reasoning_parser not in REASONING_PARSERS:
        raise ConfigError(
            f"{key}: {path}.reasoning_parser is {parser.reasoning_parser!r}: name one of "
            f"{', '.join(REASONING_PARSERS)}, or leave it empty"
        )
    if not isinstance(parser.call_form, CallForm | None):
        raise ConfigError(f"{key}: {path}.call_form must be a tailrace.chat.CallForm or None")
    try:
        with foreign_code(f"{key}: trying {path}"):
            certain: Any = parser.certain(_PLAIN_REPLY, 0)
            parsed: Any = parser.parse(_PLAIN_REPLY, ())
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(certain, int) or not isinstance(parsed, ParsedCalls):
        raise ConfigError(
            f"{key}: {path}: certain must return an int and parse a tailrace.chat.ParsedCalls (found "
            f"{type(certain).__name__} and {type(parsed).__name__})"
        )
    return _GuardedToolParser(parser, path)


def load_reasoning_parser(path: str, key: str) -> ReasoningParser:
    """Makes a user's reasoning parser; `ConfigError` names `key`, the error and the remedy."""
    parser = _made(path, key, ReasoningParser, "splitter(self, prompt)")
    assert isinstance(parser, ReasoningParser)
    _check_special_texts(parser, path, key)
    try:
        with foreign_code(f"{key}: trying {path}"):
            splitter = parser.splitter("")
            splits: tuple[Any, Any] = splitter.feed(_PLAIN_REPLY), splitter.finish()
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error
    if not all(isinstance(split, Split) for split in splits):
        raise ConfigError(
            f"{key}: {path}: feed and finish of its splitter must return a tailrace.chat.Split"
        )
    return _GuardedReasoningParser(parser, path)


def _made(path: str, key: str, base: type, method: str) -> object:
    found = load_object(path, key)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(
            f"{key}: {path!r} is not a subclass of tailrace.chat.{base.__name__}: derive a class and "
            f"define {method}"
        )
    try:
        with foreign_code(f"{key}: making {path}"):
            return found()
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error


def _check_special_texts(parser: ToolParser | ReasoningParser, path: str, key: str) -> None:
    texts: Any = parser.special_texts
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{key}: {path}.special_texts must be a tuple of texts, found {texts!r}")


def _checked(returned: object, kind: type[R]) -> R:
    """Returns what user code returned; `msgspec.ValidationError` if its parts have other types."""
    return msgspec.convert(msgspec.to_builtins(returned), kind)


class _GuardedToolParser(ToolParser):
    def __init__(self, parser: ToolParser, path: str) -> None:
        self._parser = parser
        self._path = path
        self.special_texts = parser.special_texts
        self.reasoning_parser = parser.reasoning_parser
        self.call_form = parser.call_form

    def certain(self, text: str, start: int) -> int:
        try:
            with foreign_code(f"{self._path}.certain"):
                found = int(self._parser.certain(text, start))
        except ForeignCodeError as error:
            log.warning("user parser failed", error=str(error))
            return start
        return max(start, min(found, len(text)))

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        try:
            with foreign_code(f"{self._path}.parse"):
                return _checked(self._parser.parse(text, tools), ParsedCalls)
        except ForeignCodeError as error:
            log.warning("user parser failed", error=str(error))
            return ParsedCalls(text, malformed=(str(error),))


class _GuardedReasoningParser(ReasoningParser):
    def __init__(self, parser: ReasoningParser, path: str) -> None:
        self._parser = parser
        self._path = path
        self.special_texts = parser.special_texts

    def thoughts(self, prompt: str) -> ThoughtMarks | None:
        try:
            with foreign_code(f"{self._path}.thoughts"):
                return self._parser.thoughts(prompt)
        except ForeignCodeError as error:
            log.warning("user parser failed", error=str(error))
            return None

    def splitter(self, prompt: str) -> ReasoningSplitter:
        try:
            with foreign_code(f"{self._path}.splitter"):
                return _GuardedSplitter(self._parser.splitter(prompt), self._path)
        except ForeignCodeError as error:
            log.warning("user parser failed", error=str(error))
            return REASONING_PARSERS["none"].splitter(prompt)


class _GuardedSplitter:
    def __init__(self, splitter: ReasoningSplitter, path: str) -> None:
        self._splitter = splitter
        self._path = path

    def feed(self, text: str) -> Split:
        try:
            with foreign_code(f"{self._path}: feed"):
                return _checked(self._splitter.feed(text), Split)
        except ForeignCodeError as error:
            return self._failed(error, text)

    def finish(self) -> Split:
        try:
            with foreign_code(f"{self._path}: finish"):
                return _checked(self._splitter.finish(), Split)
        except ForeignCodeError as error:
            return self._failed(error, "")

    def _failed(self, error: ForeignCodeError, text: str) -> Split:
        """Passes this and all later text on as content."""
        log.warning("user parser failed", error=str(error))
        self._splitter = REASONING_PARSERS["none"].splitter("")
        return Split(content=text)
