"""Request bodies: JSON decoded into typed Structs, with errors that name the field.

Invariant: the gateway refuses by name each field of a dialect that it does not support; a field that is
null asks for nothing.
"""

import codecs
import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from tailrace_gateway.core.broken_text import broken_text_place
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_protos.base import UNREADABLE

T = TypeVar("T")

_PART_OF_CHARACTER = (
    "the text has a part of a character (half of a surrogate pair, or bytes that are not UTF-8): send "
    "whole characters only"
)
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?$")
_NULL = re.compile(r"Expected `.*`, got `null` - at `\$\.(?:(.*)\.)?[^.`]+`$")
_AT = re.compile(r"^(.*?)(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a request; unknown fields are refused."""


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is supported, and that of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[TextPart] | None
TEXT_TYPES = ("text", "input_text", "output_text")


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read_body(raw: bytes, kind: type[T]) -> T:
    """Decode a body; raise `BadRequestError` with the field's name."""
    kind_key: Any = kind
    try:
        try:
            body: T = _decoder(kind_key).decode(raw)
        except msgspec.ValidationError as error:
            asked = _asked(raw, str(error))
            if asked != raw:
                return read_body(asked, kind)
            raise _explained(str(error)) from error
    except UNREADABLE as error:
        place = broken_text_place(raw)
        reason = f"{place}: {_PART_OF_CHARACTER}" if place else _not_json(raw, error)
        raise BadRequestError(reason, param=place, code="invalid_json") from error
    return body


def _not_json(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return "the body is empty: send the request as JSON"
    if raw.startswith(codecs.BOM_UTF8):
        return "the body is not valid JSON: it begins with a byte-order mark: send UTF-8 without it"
    return f"the body is not valid JSON: {error}"


def _asked(raw: bytes, reason: str) -> bytes:
    """Return the body without null fields beside the one that cannot be decoded."""
    if unknown := _UNKNOWN.match(reason):
        return _without_nulls(raw, unknown[2] or "")
    null = _NULL.match(reason)
    return _without_nulls(raw, null[1] or "") if null else raw


def _without_nulls(raw: bytes, place: str) -> bytes:
    """Return the body without the null fields of its object at `place`, such as `stream_options`.

    The body itself (place ``) is one too. Without such fields, `raw` is returned.
    """
    try:
        fields = _decoder(dict[str, msgspec.Raw]).decode(raw)
    except msgspec.ValidationError:
        return raw
    if place:
        name, _, rest = place.partition(".")
        inner = bytes(fields.get(name, b""))
        asked = _without_nulls(inner, rest) if inner else inner
        return raw if asked == inner else msgspec.json.encode(fields | {name: msgspec.Raw(asked)})
    kept = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    return msgspec.json.encode(kept) if len(kept) < len(fields) else raw


def _explained(reason: str) -> BadRequestError:
    if unknown := _UNKNOWN.match(reason):
        parent, name = unknown.group(2), unknown.group(1)
        param = f"{parent}.{name}" if parent else name
        return UnsupportedError(f"{param} is not supported here: leave it out", param=param)
    matched = _AT.match(reason)
    assert matched is not None
    problem, param = matched.group(1), matched.group(2) or ""
    missing = re.match(r"Object missing required field `([^`]+)`", problem)
    if missing and missing.group(1):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return BadRequestError(f"{param}: {problem}" if param else problem, param=param)


class DefaultOnly:
    """Fields that the gateway does not support, with the values that have no effect and are accepted.

    None is always accepted.
    """

    def __init__(self, **values: Any) -> None:
        self._values = {name: (None, *values[name]) for name in values}
        self._values_of = _getter(tuple(values))
        self._nothing = (None,) * len(values)

    def require(self, body: Body) -> None:
        """Raise `UnsupportedError` for a field with any other value."""
        values = self._values_of(body)
        if values == self._nothing:
            return
        for (name, allowed), value in zip(self._values.items(), values, strict=True):
            if value not in allowed:
                raise UnsupportedError(f"{name}: {value!r} is not supported here", param=name)


class NumberRanges:
    """Inclusive ranges of number fields; None is always accepted."""

    def __init__(self, **bounds: tuple[float, float]) -> None:
        self._bounds = bounds
        self._values_of = _getter(tuple(bounds))
        self._nothing = (None,) * len(bounds)

    def require(self, body: Body) -> None:
        """Raise `BadRequestError` for a number outside its range."""
        values = self._values_of(body)
        if values == self._nothing:
            return
        for (name, (low, high)), value in zip(self._bounds.items(), values, strict=True):
            if value is not None and not low <= value <= high:
                reason = f"{name}: {value} is not between {low} and {high}"
                raise BadRequestError(reason, param=name)


def _getter(names: tuple[str, ...]) -> Callable[[Body], tuple[Any, ...]]:
    """Return a function that reads all fields at once: a request has dozens, and most are unset."""
    return attrgetter(*names) if len(names) > 1 else lambda body: (getattr(body, names[0]),)


def text_of(content: Content, place: str) -> str:
    """Return the text of a message's content; a newline joins the parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: TextPart, place: str) -> str:
    if part.type not in (*TEXT_TYPES, "refusal"):
        raise UnsupportedError(
            f"{place}: parts of type {part.type!r} are not supported: the model reads text only",
            param=place,
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise BadRequestError(f"{place}.{name} is missing", param=f"{place}.{name}")
    return text


def stop_strings(
    stop: str | list[str] | None, param: str = "stop", max_stops: int = 16
) -> tuple[str, ...]:
    """Return the stop strings as a tuple."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not text for text in stops) or len(stops) > max_stops:
        raise BadRequestError(f"{param}: at most {max_stops} texts, none of them empty", param=param)
    return stops
