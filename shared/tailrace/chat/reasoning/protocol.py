"""Reasoning parser: the declaration of one format in which models mark their thoughts."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple, Protocol


class Split(NamedTuple):
    """Newly certain text of a reply. `content` still contains tool calls, as the model wrote them."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter(Protocol):
    """Splits one reply. It never takes text back, and all pieces together do not depend on the cuts."""

    def feed(self, text: str) -> Split:
        """Takes the next piece of the reply's text."""

    def finish(self) -> Split:
        """Ends the reply; returns the text that was held back."""


class ThoughtMarks(NamedTuple):
    """Markers of the thoughts that begin a reply. No `end`: none. No `begin`: the prompt has it."""

    begin: str = ""
    end: str = ""


class ReasoningParser(ABC):
    """One format of thoughts. Its splitters raise nothing, whatever text a model wrote.

    A subclass takes no constructor arguments.
    """

    special_texts: tuple[str, ...] = ()
    """Special tokens that the parser needs to see in the text."""

    def recognizes(self, template_source: str, token_texts: Collection[str]) -> bool:
        """True if `auto` selects this parser for a chat template and the tokenizer's added tokens."""
        return False

    def thoughts(self, prompt: str) -> ThoughtMarks | None:
        """Markers in a reply to such a prompt, for guided replies. None: replies cannot be guided."""
        return None

    @abstractmethod
    def splitter(self, prompt: str) -> ReasoningSplitter:
        """Returns a splitter for a reply to a generation prompt that ends with `prompt`."""


class NoReasoning(ReasoningParser):
    """`none`: the model marks no thoughts; the whole reply is its answer."""

    def thoughts(self, prompt: str) -> ThoughtMarks:
        """See `ReasoningParser`."""
        return ThoughtMarks()

    def splitter(self, prompt: str) -> "AnswerSplitter":
        """Returns a splitter that passes all text on."""
        return AnswerSplitter()


class AnswerSplitter:
    """Passes all text on as content."""

    def feed(self, text: str) -> Split:
        """Returns the text unchanged."""
        return Split(content=text)

    def finish(self) -> Split:
        """Returns nothing, because nothing is held back."""
        return Split()
