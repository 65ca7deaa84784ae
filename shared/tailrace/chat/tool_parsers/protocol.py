"""Tool parser: the declaration of one format in which models write tool calls."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.chat.text_stream import first_possible
from tailrace_protos.chat import ToolSchema


class FoundCall(NamedTuple):
    """Well-formed call. `arguments`: a JSON object as text. `call_id`: the model's own id, or empty."""

    name: str
    arguments: str
    call_id: str = ""


class ParsedCalls(NamedTuple):
    """Reply without its calls. Malformed calls stay in `content`; `malformed` states their errors."""

    content: str
    calls: tuple[FoundCall, ...] = ()
    malformed: tuple[str, ...] = ()


class CallForm(NamedTuple):
    """Text around a call that an engine is made to write: `begin`, a JSON object, `end`."""

    begin: str = ""
    end: str = ""
    separator: str = ""  # between two calls
    arguments_key: str = "arguments"


class ToolParser(ABC):
    """One format of tool calls. Its methods raise nothing, whatever text a model wrote.

    A subclass sets the attributes that differ and defines `parse`. It takes no constructor arguments.
    """

    special_texts: tuple[str, ...] = ()
    """Special tokens that the parser needs to see in the text."""

    begins: tuple[str, ...] = ()
    """Markers that a call begins with. Text before the first marker is streamed to clients at once.
    Empty: the text is held back until the reply ends."""

    template_call: re.Pattern[str] | None = None
    """Finds this format in a call of the tool `probe` that a chat template rendered. `auto` selects the
    parser by it. None: `auto` never selects this parser."""

    call_form: CallForm | None = None
    """Form of a required call. None: engines are not bound to this format; replies are only checked."""

    reasoning_parser: str = ""
    """Name of the reasoning parser that this format needs. Empty: any."""

    def certain(self, text: str, start: int) -> int:
        """Number of characters of `text`, an incomplete reply, that are content for sure.

        The result is at least `start`. These characters stay content, whatever text follows.
        """
        return first_possible(text, self.begins, start) if self.begins else start

    @abstractmethod
    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Separates a complete reply into content and calls. `tools` gives the types of arguments."""


class NoToolCalls(ToolParser):
    """`none`: replies contain no tool calls."""

    def certain(self, text: str, start: int) -> int:
        """All text is content."""
        return len(text)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Returns the text unchanged."""
        return ParsedCalls(text)
