"""JSON Schema of a Python function's arguments, and conversion of arguments for a call.

The signature has names, types and optional arguments; the docstring has their meaning (Google, reST or
NumPy style; `Annotated[int, "the meaning"]` takes precedence). Types are those that msgspec knows:
numbers, strings, lists, dicts, enums, `Literal`, optional ones, dataclasses, Structs, TypedDicts.
"""

import inspect
import re
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec

_REFERENCE = "#/$defs/{name}"


class ArgumentsError(ValueError):
    """Arguments do not fit a tool's parameters; the model reads the text."""


class Signature:
    """Parameters of a function as a model sees them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        where = f"{function.__module__}.{function.__qualname__}"
        self.description, meanings = parse_docstring(inspect.getdoc(function) or "")
        self._arguments = _arguments_struct(function, where, meanings)
        try:
            self.parameters = _schema(self._arguments)
        except TypeError as error:
            raise TypeError(
                f"{where}: a tool's parameters must be types that JSON can carry ({error}): use "
                "numbers, str, lists, dicts, enums, Literal, dataclasses or Structs"
            ) from error

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Converts keyword arguments to the function's types; raises `ArgumentsError`."""
        try:
            bound = msgspec.convert(arguments, self._arguments)
        except msgspec.ValidationError as error:
            raise ArgumentsError(
                str(error).replace("`$.", "`").replace("Object ", "The object ")
            ) from error
        given = {name: getattr(bound, name) for name in bound.__struct_fields__}
        return {name: value for name, value in given.items() if value is not msgspec.UNSET}


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Splits a docstring into the description and the meaning of each parameter."""
    lines = text.splitlines()
    end = next((index for index, line in enumerate(lines) if _begins_section(lines, index)), len(lines))
    description = "\n".join(lines[:end]).strip()
    meanings = {**_google(lines), **_numpy(lines), **_rest(text)}
    return description, {name: " ".join(words.split()) for name, words in meanings.items()}


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):?\s*$")
_REST = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+):\s*((?:.|\n(?!\s*:|\s*\n))*)", re.MULTILINE)
_GOOGLE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_NUMPY = re.compile(r"^(\w+)\s*(?::.*)?$")


def _begins_section(lines: list[str], index: int) -> bool:
    line = lines[index]
    if line.lstrip().startswith(":") and re.match(r"\s*:\w+[^:]*:", line):
        return True
    if not _SECTION.match(line):
        return False
    return line.rstrip().endswith(":") or _is_underlined(lines, index)


def _is_underlined(lines: list[str], index: int) -> bool:
    below = lines[index + 1].strip() if index + 1 < len(lines) else ""
    return len(below) >= 3 and set(below) == {"-"}


def _google(lines: list[str]) -> dict[str, str]:
    starts = [
        i for i, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:", "Parameters:")
    ]
    return _entries(lines, starts[0] + 1, _GOOGLE) if starts else {}


def _numpy(lines: list[str]) -> dict[str, str]:
    starts = [
        i for i, line in enumerate(lines) if line.strip() == "Parameters" and _is_underlined(lines, i)
    ]
    return _entries(lines, starts[0] + 2, _NUMPY) if starts else {}


def _entries(lines: list[str], start: int, head: re.Pattern[str]) -> dict[str, str]:
    """Entries from `start` to the end of the section; lines indented deeper continue an entry."""
    found: dict[str, str] = {}
    current = ""
    section = _section(lines, start)
    depth = _indent(section[0]) if section else 0
    for line in section:
        match = head.match(line.strip()) if _indent(line) == depth else None
        if match:
            current = match.group(1)
            found[current] = match.group(2) if head.groups > 1 else ""
        elif current:
            found[current] += " " + line.strip()
    return found


def _section(lines: list[str], start: int) -> list[str]:
    """Non-empty lines from `start` to the next section, or to a line indented less than the first."""
    section: list[str] = []
    for index in range(start, len(lines)):
        line = lines[index]
        if not line.strip():
            continue
        is_outside = bool(section) and _indent(line) < _indent(section[0])
        if is_outside or _begins_section(lines, index):
            break
        section.append(line)
    return section


def _rest(text: str) -> dict[str, str]:
    return {match.group(1): match.group(2) for match in _REST.finditer(text)}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _arguments_struct(
    function: Callable[..., Any], where: str, meanings: dict[str, str]
) -> type[msgspec.Struct]:
    hints = _hints(function, where)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: a tool's parameters need names, so {parameter} cannot be one")
        kind = hints.get(parameter.name, Any)
        meaning = _annotated_meaning(kind) or meanings.get(parameter.name, "")
        if parameter.default is None:  # as the schema shows it: a model may also write null
            kind = kind | None
        if meaning:
            kind = Annotated[kind, msgspec.Meta(description=meaning)]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, *_with_default(kind, parameter.default)))
    return msgspec.defstruct(
        function.__name__, fields, kw_only=True, forbid_unknown_fields=True, module=function.__module__
    )


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Types of the parameters. What the function returns need not be known here."""
    declared = getattr(function, "__annotations__", {})  # functions written in C have none
    written = {name: kind for name, kind in declared.items() if name != "return"}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__=written), names, include_extras=True
        )
    except NameError as error:
        raise TypeError(
            f"{where}: the type of a parameter is not known when the tool is made ({error}): import it "
            "outside of TYPE_CHECKING"
        ) from error


def _with_default(kind: Any, default: Any) -> tuple[Any, Any]:
    """Makes an optional field; a default that JSON cannot represent is left to the function."""
    if default is None or isinstance(default, bool | int | float | str):
        return kind, default
    return kind | msgspec.UnsetType if not isinstance(kind, str) else kind, msgspec.UNSET


def _annotated_meaning(kind: Any) -> str:
    """Returns the text of `Annotated[T, "text"]`."""
    return next((extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, str)), "")


def _schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Makes the Struct's schema as one object; references stay only if a type contains itself."""
    (top,), components = msgspec.json.schema_components([arguments], ref_template=_REFERENCE)
    name = top["$ref"].rpartition("/")[2]
    inlined: dict[str, Any] = _inline(components[name], components, (name,))
    inlined.pop("title", None)
    used = {
        other for direct in _references(inlined) for other in (direct, *_reached(direct, components))
    }
    if used:
        inlined["$defs"] = {key: components[key] for key in sorted(used)}
    return inlined


def _inline(node: Any, components: dict[str, Any], above: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_inline(item, components, above) for item in node]
    if not isinstance(node, dict):
        return node
    name = str(node.get("$ref", "")).rpartition("/")[2]
    if name and name not in above and name not in _self_containing(components):
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inline(components[name], components, (*above, name)), **rest}
    return {key: _inline(value, components, above) for key, value in node.items()}


def _self_containing(components: dict[str, Any]) -> set[str]:
    """Names of the types that contain themselves, directly or not."""
    return {name for name in components if name in _reached(name, components)}


def _reached(name: str, components: dict[str, Any]) -> set[str]:
    """Names of the types that a type contains, directly or not."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        fresh = _references(components[waiting.pop()]) - seen
        seen |= fresh
        waiting += fresh
    return seen


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*(_references(item) for item in node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*(_references(value) for value in node.values()))
