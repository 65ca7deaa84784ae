"""Suggestions for a name that is unknown at its place."""

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that is spelt most like `name`; empty if none is close."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return near[0] if near else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Names the closest of the valid keys `names`, or lists all of them."""
    known = sorted(names)
    near = closest(name, known)
    return f"did you mean {near!r}?" if near else f"valid keys: {', '.join(known)}"


def not_one_of(shown: str, names: Iterable[str]) -> str:
    """Says that `shown` (a quoted name, or a number) is not one of `names`, and names the closest one.

    A name that begins with the given one is closer than one that is only spelt alike.
    """
    known, given = sorted(names), shown.strip("'\"")
    longer = [name for name in known if given and name.startswith(given)]
    near = longer[0] if longer else closest(given, known)
    remedy = f"; did you mean {near!r}?" if near else ""
    return f"{shown} is none of {', '.join(known)}{remedy}"
