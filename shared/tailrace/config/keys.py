"""Keys of a configuration Struct: types, and the entries of the reference."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.inspect import (
    AnyType,
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
)

from tailrace.config.base import Config

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
_PLAIN = {
    AnyType: "any",
    BoolType: "true or false",
    FloatType: "number",
    IntType: "integer",
    StrType: "text",
    NoneType: "null",
}
_UNITS = {
    "s": "seconds",
    "ms": "milliseconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "chars": "characters",
    "steps": "learner steps",
    "turns": "turns",
    "episodes": "episodes",
    "groups": "groups",
}


class Key(NamedTuple):
    """A key of an experiment."""

    name: str  # dotted; `*` stands for any name or item
    type: str
    default: str  # "required" without one
    unit: str  # empty without one
    meaning: str


def type_at(info: Any, path: str) -> Any:
    """Returns msgspec's description of the type at a dotted path below `info`; None without one.

    A step names a key of a Struct or of a dict; `[...]` is any value of a dict or item of a list.
    """
    for step in _STEP.findall(path):
        info = next(filter(None, (_child(each, step) for each in alternatives(info))), None)
    return info


def alternatives(info: Any) -> tuple[Any, ...]:
    """Returns the types that a union allows; another type alone."""
    return getattr(info, "types", (info,))


def fields_of(info: Any) -> list[str]:
    """Returns the keys of the Struct that `info` allows; none without a Struct."""
    return [field.encode_name for each in alternatives(info) for field in getattr(each, "fields", ())]


def literals_in(info: Any) -> list[str]:
    """Returns the values of a `Literal` within optional, list and dict types; none of other types."""
    if info is None:
        return []
    if isinstance(info, LiteralType):
        return [str(value) for value in info.values]
    types = alternatives(info)
    inner = types if len(types) > 1 else (_inner(info),)
    return [name for each in inner for name in literals_in(each)]


def keys_of(kind: type[Config], section: str = "") -> Iterator[Key]:
    """Yields every key of `kind`, those of nested Structs behind their own section."""
    prefix = f"{section}." if section else ""
    prose = _prose(kind)
    info: Any = msgspec.inspect.type_info(kind)
    for field in info.fields:
        name = f"{prefix}{field.encode_name}"
        unit = _UNITS.get(field.encode_name.rpartition("_")[2], "")
        is_number = any(isinstance(each, IntType | FloatType) for each in alternatives(field.type))
        yield Key(
            name,
            _shown_type(field.type),
            _shown_default(field),
            unit if is_number else "",
            prose.get(field.encode_name, ""),
        )
        for nested, below in _structs_in(field.type, name):
            yield from keys_of(nested, below)


def _child(info: Any, step: str) -> Any:
    if isinstance(info, AnyType):
        return info
    if step.startswith("["):
        return _inner(info)
    fields = getattr(info, "fields", ())
    found = next((field.type for field in fields if field.encode_name == step), None)
    return info.value_type if found is None and isinstance(info, DictType) else found


def _inner(info: Any) -> Any:
    """Returns the type of a dict's values or of a list's items; None for other types."""
    return getattr(info, "value_type", None) or getattr(info, "item_type", None)


def _structs_in(info: Any, name: str) -> Iterator[tuple[type[Config], str]]:
    for each in alternatives(info):
        if isinstance(each, StructType) and issubclass(each.cls, Config):
            yield each.cls, name
        elif (inner := _inner(each)) is not None:
            yield from _structs_in(inner, f"{name}.*")


@cache
def _prose(kind: type[Config]) -> dict[str, str]:
    """Returns the text under each field of a Struct and its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Config) or base is Config:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(after.value, ast.Constant)
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _shown_type(info: Any) -> str:
    if isinstance(info, LiteralType):
        return " or ".join(f"`{value}`" for value in info.values)
    if isinstance(info, StructType):
        return "section"
    if isinstance(info, DictType):
        return f"{_shown_type(info.value_type)} by name"
    if (inner := _inner(info)) is not None:
        return f"list of {_shown_type(inner)}"
    if len(types := alternatives(info)) > 1:
        return " or ".join(dict.fromkeys(map(_shown_type, types)))
    return _PLAIN.get(type(info), "list")


def _shown_default(field: Any) -> str:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, Config):
        default = {
            name: getattr(default, name)
            for name in default.__struct_fields__
            if getattr(default, name) != getattr(type(default)(), name)
        }
    return msgspec.json.encode(msgspec.to_builtins(default)).decode() if default != "" else '""'
