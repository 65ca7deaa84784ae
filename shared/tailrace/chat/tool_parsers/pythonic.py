"""`pythonic`: the whole reply is a Python list of calls with literal arguments (Llama 3.2 and 4)."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, make_call
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_LOOKS_LIKE_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.\-]*\s*\(")
_MAX_CHARS = 65_536
_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """Format `[f(x=1), g(y="a")]`. A reply that is a list without calls is content."""

    special_texts = (_BEGIN, _END)
    template_call = re.compile(r"\[probe\(")

    def certain(self, text: str, start: int) -> int:
        """Nothing while the reply may be a list, all text when it cannot be one."""
        begun = text.lstrip()
        may_be_list = not begun or begun.startswith(("[", _BEGIN)) or _BEGIN.startswith(begun)
        return start if may_be_list else len(text)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`."""
        found = CallCollector()
        bare = text.strip().removeprefix(_BEGIN).removesuffix(_END).strip()
        if not _LOOKS_LIKE_CALLS.match(bare):
            return ParsedCalls(text)
        found.block(text, lambda: _calls(bare, tools))
        return found.parsed()


def _calls(text: str, tools: Sequence[ToolSchema]) -> list[FoundCall]:
    if len(text) > _MAX_CHARS:
        raise NoCallError(f"it is longer than {_MAX_CHARS} characters")
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise NoCallError(f"invalid syntax: {error.msg}") from error
    except (MemoryError, RecursionError, ValueError) as error:
        raise NoCallError(f"invalid syntax: {error}") from error
    if not isinstance(body, ast.List):
        raise NoCallError("it is not a list of calls")
    try:
        return [_call(item, tools) for item in body.elts]
    except RecursionError as error:
        raise NoCallError("it is nested too deeply") from error


def _call(item: ast.expr, tools: Sequence[ToolSchema]) -> FoundCall:
    if not isinstance(item, ast.Call):
        raise NoCallError("not every item of the list is a call")
    name = _full_name(item.func)
    arguments = dict(zip(_positional(name, len(item.args), tools), map(_value, item.args), strict=True))
    for keyword in item.keywords:
        if keyword.arg is None:
            raise NoCallError(f"the call of {name} unpacks a dict")
        if keyword.arg in arguments:
            raise NoCallError(f"the call of {name} gives {keyword.arg} twice")
        arguments[keyword.arg] = _value(keyword.value)
    return make_call(name, arguments)


def _positional(name: str, count: int, tools: Sequence[ToolSchema]) -> list[str]:
    """Names of the first `count` parameters, in the schema's order."""
    known = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
    names = list(known) if isinstance(known, dict) else []
    if count > len(names):
        raise NoCallError(f"the arguments of {name} must be named")
    return names[:count]


def _full_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value)}.{node.attr}"
    raise NoCallError("a call must begin with a name")


def _value(node: ast.expr) -> Any:
    """JSON value of a literal."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as constant):
            return constant
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_key, keys), map(_value, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _negated(_value(operand))
    raise NoCallError("arguments must be literals")


def _negated(number: Any) -> float:
    if isinstance(number, int | float):
        return -number
    raise NoCallError("arguments must be literals")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NoCallError("keys must be strings")
