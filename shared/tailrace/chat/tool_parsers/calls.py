"""Building blocks of tool parsers: checked calls, JSON values, blocks between markers.

A call has a valid name and canonical JSON arguments: one JSON object in the model's order of keys,
without superfluous white space and without values that JSON lacks (NaN, infinities). Nothing in it has
lone surrogates, which no message can carry.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls

_NAME = re.compile(r"[^\s<>\"'{}\[\]()\ud800-\udfff]{1,256}")
_EXCERPT_CHARS = 80


class NoCallError(ValueError):
    """The text is not a call; the message tells the model why."""


def parse_json(text: str) -> Any:
    """Parses any JSON value; `NoCallError` names the place of the error."""
    text = text.strip()
    value, end = _json_value(text, 0)
    if end < len(text):
        raise NoCallError(f"invalid JSON: text follows it: {excerpt(text[end:])}")
    return value


def _json_value(text: str, start: int) -> tuple[Any, int]:
    """JSON value that begins at `start`, and its end."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = excerpt(text[max(0, error.pos - 20) : error.pos + 20])
        raise NoCallError(f"invalid JSON near {near}: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise NoCallError(f"invalid JSON: {error}") from error


def make_call(name: object, arguments: object, call_id: object = "") -> FoundCall:
    """Checks a name and arguments, an object or its JSON text; `NoCallError` if they are no call."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NoCallError(f"{excerpt(str(name))} is no name of a tool")
    if isinstance(arguments, str):
        arguments = parse_json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise NoCallError(f"the arguments of {name} must be a JSON object")
    own_id = call_id if isinstance(call_id, str) and _NAME.fullmatch(call_id) else ""
    return FoundCall(name, _canonical(name, arguments), own_id)


def call_of(value: object) -> FoundCall:
    """Builds a call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        raise NoCallError(f"{excerpt(json.dumps(value))} is not an object with name and arguments")
    inner = value.get("function")
    if isinstance(inner, dict):
        value = {**value, **inner}
    arguments = value.get("arguments", value.get("parameters"))
    return make_call(value.get("name"), arguments, value.get("id", ""))


def calls_of(values: list[object]) -> list[FoundCall]:
    """Builds the calls of several objects, or of one array of objects; at least one."""
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if not values:
        raise NoCallError("it is empty")
    return [call_of(value) for value in values]


def json_values(text: str, separators: str = "") -> list[object]:
    """Parses all JSON values that follow one another in `text`; at least one."""
    values: list[object] = []
    text = text.strip()
    at = 0
    while at < len(text):
        value, at = _json_value(text, at)
        values.append(value)
        while at < len(text) and (text[at].isspace() or text[at] in separators):
            at += 1
    if not values:
        raise NoCallError("it is empty")
    return values


def excerpt(text: str) -> str:
    """Quotes the beginning of a text for an error message."""
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "...")


class CallCollector:
    """Collects content, calls and errors of one reply, in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[FoundCall] = []
        self._malformed: list[str] = []

    def text(self, text: str) -> None:
        """Adds text outside of any call."""
        self._content.append(text)

    def block(self, raw: str, parse: Callable[[], Iterable[FoundCall]]) -> None:
        """Adds the calls that `parse` returns; on `NoCallError` the text `raw` becomes content."""
        try:
            self._calls.extend(parse())
        except NoCallError as error:
            self._content.append(raw)
            self._malformed.append(f"tool call {excerpt(raw.strip())} could not be read: {error}")

    def blocks(
        self,
        text: str,
        begin: str,
        end: str,
        parse: Callable[[str], Iterable[FoundCall]],
        outside: Callable[[str], str] = str,
    ) -> None:
        """Adds a text with its blocks; a block without `end` reaches to the end of the text.

        `outside` converts the text around blocks.
        """
        at = 0
        while (start := text.find(begin, at)) >= 0:
            inside = start + len(begin)
            found = text.find(end, inside)
            stop, behind = (found, found + len(end)) if found >= 0 else (len(text), len(text))
            self.text(outside(text[at:start]))
            self.block(text[start:behind], partial(parse, text[inside:stop]))
            at = behind
        self.text(outside(text[at:]))

    def parsed(self) -> ParsedCalls:
        """Returns the reply; white space between content and calls is removed."""
        content = "".join(self._content)
        if self._calls:
            content = content.rstrip()
        return ParsedCalls(content, tuple(self._calls), tuple(self._malformed))


def _canonical(name: str, arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (RecursionError, TypeError, ValueError) as error:  # a lone surrogate is a ValueError
        raise NoCallError(f"the arguments of {name} cannot be written as JSON: {error}") from error
    return text


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
