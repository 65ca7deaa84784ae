"""What a reply does: the first `search[words]` or `click[name]` in it, read against a page's names.

Case and the number of blanks do not matter, and names may have brackets of their own. Every name that a
page offers is clickable as it is written, even beside names that differ in case or blanks alone, or
that begin with it: an exact name is preferred, then the longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

_OPENER = re.compile(r"\b(search|click)\s*\[(?=[^\]]*\])", re.IGNORECASE)
_WORDS = re.compile(r"((?:[^\[\]]|\[[^\[\]]*\])*)\]")  # with brackets in pairs
_UP_TO_A_BRACKET = re.compile(r"([^\]]*)\]")


class Action(NamedTuple):
    """An action that a page may take. `words`: of a search `plain`, of a click the name offered."""

    verb: Literal["search", "click"]
    words: str


def read_action(reply: str, names: Sequence[str]) -> Action | None:
    """The reply's first action; None without any, without words, or for a click on none of `names`."""
    opener = _OPENER.search(reply)
    if opener is None:
        return None
    rest = reply[opener.end() :]
    if opener.group(1).lower() == "click":
        name = _clicked(rest, names)
        return None if name is None else Action("click", name)
    found = _WORDS.match(rest) or _UP_TO_A_BRACKET.match(rest)
    words = plain(found.group(1)) if found else ""
    return Action("search", words) if words else None


def plain(text: str) -> str:
    """A name or words without what does not matter: in lower case, with single blanks."""
    return " ".join(text.lower().split())


def _clicked(rest: str, names: Sequence[str]) -> str | None:
    """The name with which `rest` begins, closed by a bracket."""
    exact = _longest(name for name in names if rest.startswith(f"{name}]"))
    if exact is not None:
        return exact
    written = plain(rest)
    return _longest(name for name in names if _begins(written, plain(name)))


def _begins(written: str, name: str) -> bool:
    return written.startswith(name) and written[len(name) :].lstrip().startswith("]")


def _longest(names: Iterable[str]) -> str | None:
    return max(names, key=len, default=None)
