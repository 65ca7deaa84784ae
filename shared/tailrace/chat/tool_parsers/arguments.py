"""What a model wrote as a call, as a checked name and canonical JSON; or the reason why it is no call.

Canonical: one JSON object, the model's order of keys, no superfluous white space, and nothing that JSON
does not know (NaN, infinities, lone surrogates).
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from tailrace.chat.tool_parsers.protocol import FoundCall

_NAME = re.compile(r"[^\s<>\"'{}\[\]()]{1,256}")
_EXCERPT_CHARS = 80


class NoCallError(ValueError):
    """What was written is no call; the message is for the model."""


def parse_json(text: str) -> Any:
    """Any JSON value; `NoCallError` says where it is wrong."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, strict=False)
    except json.JSONDecodeError as error:
        near = excerpt(text[max(0, error.pos - 20) : error.pos + 20])
        raise NoCallError(f"invalid JSON near {near}: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise NoCallError(f"invalid JSON: {error}") from error


def make_call(name: object, arguments: object, call_id: object = "") -> FoundCall:
    """A call of a name that can be one and arguments that are an object, or JSON text of one."""
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
    """A call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        raise NoCallError(f"{excerpt(json.dumps(value))} is not an object with name and arguments")
    inner = value.get("function")
    if isinstance(inner, dict):
        value = {**value, **inner}
    arguments = value.get("arguments", value.get("parameters"))
    return make_call(value.get("name"), arguments, value.get("id", ""))


def excerpt(text: str) -> str:
    """The beginning of a text, quoted, for error messages."""
    return repr(text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "...")


def _canonical(name: str, arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (RecursionError, TypeError, ValueError) as error:  # a lone surrogate is a ValueError
        raise NoCallError(f"the arguments of {name} cannot be written as JSON: {error}") from error
    return text


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
