"""Place of a text in a JSON body that is not Unicode.

A client that cuts a text in the middle of an emoji sends half of a surrogate pair, or half of its
bytes. JSON decoders then report a position in the bytes, or a body that ends too early.
"""

import json
from typing import Any

_MAX_BYTES = 1 << 19  # so that the search of any body takes tens of milliseconds


def broken_text_place(raw: bytes) -> str:
    """Return the place of the first such text, such as `messages[0].content`.

    Empty: there is none, or the body is too large to be searched while others wait.
    """
    if len(raw) > _MAX_BYTES:
        return ""
    try:
        place = _place_in(json.loads(raw.decode("utf-8", "surrogateescape")))
    except (ValueError, RecursionError):
        return ""
    return (place or "").removeprefix(".")


def _place_in(value: Any) -> str | None:
    """Return the place of the first broken text below a value; a broken name is at its object."""
    if isinstance(value, str):
        return "" if _is_broken(value) else None
    if isinstance(value, dict):
        if any(map(_is_broken, value)):
            return ""
        steps = ((f".{name}", inner) for name, inner in value.items())
    elif isinstance(value, list):
        steps = ((f"[{index}]", inner) for index, inner in enumerate(value))
    else:
        return None
    for step, inner in steps:
        if (place := _place_in(inner)) is not None:
            return step + place
    return None


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
