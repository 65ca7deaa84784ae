"""Formats whose calls stand between two markers: content, calls and errors of all blocks of a reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tailrace.chat.tool_parsers.arguments import NoCallError, excerpt
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls

Block = tuple[str, str]  # as written, and what stands in it


class CallCollector:
    """Puts content and calls of one reply together, in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[FoundCall] = []
        self._malformed: list[str] = []

    def text(self, text: str) -> None:
        """Text that belongs to no call."""
        self._content.append(text)

    def block(self, raw: str, parse: Callable[[], Iterable[FoundCall]]) -> None:
        """A block of calls as written; one that cannot be read stays in the content."""
        try:
            self._calls.extend(parse())
        except NoCallError as error:
            self._content.append(raw)
            self._malformed.append(f"tool call {excerpt(raw.strip())} could not be read: {error}")

    def parsed(self) -> ParsedCalls:
        """The reply; white space between content and calls belongs to the calls."""
        content = "".join(self._content)
        if self._calls:
            content = content.rstrip()
        return ParsedCalls(content, tuple(self._calls), tuple(self._malformed))


def split_blocks(text: str, begin: str, end: str) -> Iterable[tuple[str, Block | None]]:
    """Text before each block with that block; the last has none. A block may lack its end."""
    rest = text
    while begin in rest:
        before, _, behind = rest.partition(begin)
        inside, found, rest = behind.partition(end)
        yield before, (begin + inside + found, inside)
    yield rest, None
