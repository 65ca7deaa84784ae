"""`think`: reasoning between `<think>` and `</think>` before the answer (DeepSeek-R1, Qwen3, ...).

A template may open the block in its generation prompt; then the reply begins inside it. Only the first
block is reasoning, later ones are content. White space around the block is dropped.
"""

from collections.abc import Collection

from tailrace.chat.reasoning.protocol import ReasoningParser, Split, ThoughtMarks
from tailrace.chat.text_stream import first_possible

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser(ReasoningParser):
    """Replies with a `<think>` block."""

    special_texts = (_OPEN, _CLOSE)

    def recognizes(self, template_source: str, token_texts: Collection[str]) -> bool:
        """See `ReasoningParser`; the template or the tokenizer has the tag."""
        return _OPEN in template_source or _OPEN in token_texts

    def thoughts(self, prompt: str) -> ThoughtMarks:
        """See `ReasoningParser`; a prompt that has closed the block leaves no thoughts to the reply."""
        if prompt.rstrip().endswith(_CLOSE):
            return ThoughtMarks()
        return ThoughtMarks("" if prompt.rstrip().endswith(_OPEN) else _OPEN, _CLOSE)

    def splitter(self, prompt: str) -> "ThinkSplitter":
        """Returns a splitter that begins inside the block if the prompt has opened it."""
        return ThinkSplitter(is_open=prompt.rstrip().endswith(_OPEN))


class ThinkSplitter:
    """State: before the block, inside it, or after it.

    White space that a mark may follow is kept apart, so that a long run of it is read once.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._spaces: list[str] = []  # white space before `_held`; dropped if a mark follows
        self._held = ""
        self._is_before = not is_open
        self._is_inside = is_open
        self._trims = is_open  # drops white space at the beginning of the reasoning or of the answer

    def feed(self, text: str) -> Split:
        """Takes the next piece of the reply's text."""
        self._held += text
        if self._is_before and not self._leave_before():
            return Split()
        reasoning = self._take_thought() if self._is_inside else ""
        return Split(reasoning, "" if self._is_inside else self._take_answer())

    def finish(self) -> Split:
        """Ends the reply; returns the text that was held back."""
        held, self._held = self._with_spaces(self._held), ""
        if self._is_inside:
            return Split(reasoning=held.strip() if self._trims else held.rstrip())
        return Split(content=held.lstrip() if self._trims else held)

    def _leave_before(self) -> bool:
        """Leaves the state before the block; False while the beginning of the reply is undecided."""
        begun = self._held.lstrip()
        self._spaces.append(self._held[: len(self._held) - len(begun)])
        self._held = begun
        if len(begun) < len(_OPEN) and _OPEN.startswith(begun):
            return False
        self._is_before = False
        self._is_inside = begun.startswith(_OPEN)
        if self._is_inside:
            self._spaces, self._held, self._trims = [], begun[len(_OPEN) :], True
        else:
            self._held = self._with_spaces(begun)
        return True

    def _take_thought(self) -> str:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        end = first_possible(self._held, (_CLOSE,))
        certain, self._held = self._held[:end], self._held[end:]
        thought = certain.rstrip()
        space = certain[len(thought) :]
        if thought:
            thought = self._with_spaces(thought)
        self._spaces.append(space)
        if self._held.startswith(_CLOSE):
            self._spaces, self._held = [], self._held[len(_CLOSE) :]
            self._is_inside, self._trims = False, True
        return thought

    def _with_spaces(self, text: str) -> str:
        """Returns the white space that was kept, with the text behind it."""
        spaces, self._spaces = self._spaces, []
        return "".join((*spaces, text))

    def _take_answer(self) -> str:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        held, self._held = self._held, ""
        return held
