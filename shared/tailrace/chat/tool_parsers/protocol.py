"""What a tool-call parser is, and what it makes of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tailrace_protos.chat import ToolSchema


class FoundCall(NamedTuple):
    """A well-formed call; `arguments` is a JSON object as text, `call_id` the model's own or empty."""

    name: str
    arguments: str
    call_id: str = ""


class ParsedCalls(NamedTuple):
    """A reply without its calls. Malformed calls stay in `content`; `malformed` says what is wrong."""

    content: str
    calls: tuple[FoundCall, ...] = ()
    malformed: tuple[str, ...] = ()


class ToolParser(Protocol):
    """One format of tool calls. Never raises on what a model wrote.

    `special_texts`: special tokens that it has to see in the text.
    """

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokens."""

    def certain(self, text: str, start: int) -> int:
        """How much of `text`, a reply's beginning, is content whatever follows; at least `start`.

        Content of a reply whose text goes on begins with that part.
        """

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out of a whole reply; `tools` tell the types of their arguments."""
