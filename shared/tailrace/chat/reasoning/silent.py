"""`none`: the model shows no thoughts; all of a reply is its answer."""

from __future__ import annotations

from tailrace.chat.reasoning.protocol import Split


class SilentParser:
    """Every reply is content."""

    special_texts: tuple[str, ...] = ()

    def splitter(self, prompt: str) -> SilentSplitter:
        """A splitter that splits nothing."""
        return SilentSplitter()


class SilentSplitter:
    """Passes text on."""

    def feed(self, text: str) -> Split:
        """The text as it is."""
        return Split(content=text)

    def finish(self) -> Split:
        """Nothing is held back."""
        return Split()
