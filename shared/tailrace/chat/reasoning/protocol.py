"""What a reasoning parser is."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Split(NamedTuple):
    """Newly certain text of a reply; tool calls are still in `content`, as the model wrote them."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter(Protocol):
    """Splits one reply. Pieces given are never taken back, and are the same however it was cut."""

    def feed(self, text: str) -> Split:
        """Take the next piece of the reply's text."""

    def finish(self) -> Split:
        """The reply has ended: what was held back."""


class ReasoningParser(Protocol):
    """One format. `special_texts`: special tokens that it has to see in the text."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokens."""

    def splitter(self, prompt: str) -> ReasoningSplitter:
        """For a reply to a generation prompt that ends with `prompt`."""
