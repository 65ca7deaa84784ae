"""What to tell a user whose name is none of those that may stand at its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def none_of(shown: str, names: Iterable[str]) -> str:
    """`shown` (a name in quotes, or a number) with all known names, and the closest if one is close.

    A name that begins with the given one is closer than one that is only spelt alike.
    """
    known, given = sorted(names), shown.strip("'\"")
    longer = [name for name in known if given and name.startswith(given)]
    near = longer or difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    remedy = f"; did you mean {near[0]!r}?" if near else ""
    return f"{shown} is none of {', '.join(known)}{remedy}"
