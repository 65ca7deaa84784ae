"""`harmony`: messages on channels (gpt-oss). `analysis` is reasoning, all other channels are content.

A reply continues after `<|start|>assistant`. A message with a recipient is a tool call: it stays in the
content as the model wrote it, from `<|start|>` to its end. Text outside of any message is content.
"""

from collections.abc import Collection

from tailrace.chat.reasoning.protocol import ReasoningParser, Split
from tailrace.chat.text_stream import first_possible

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
_ROLE = "assistant"
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, CONSTRAIN, " to=", "to=")


class HarmonyParser(ReasoningParser):
    """Replies on channels."""

    special_texts = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def recognizes(self, template_source: str, token_texts: Collection[str]) -> bool:
        """See `ReasoningParser`; the template writes channels."""
        return CHANNEL in template_source

    def splitter(self, prompt: str) -> "HarmonySplitter":
        """Returns a splitter that begins in the header of the first message."""
        return HarmonySplitter()


class HarmonySplitter:
    """State: in a header (`_kind` is None), or in a message of that kind."""

    def __init__(self) -> None:
        self._held = ""
        self._kind: str | None = None
        self._parts = {"reasoning": "", "content": ""}
        self._has_given = {"reasoning": False, "content": False}
        self._must_part = {"reasoning": False, "content": False}

    def feed(self, text: str) -> Split:
        """Takes the next piece of the reply's text."""
        self._held += text
        while self._advance():
            pass
        return self._given()

    def finish(self) -> Split:
        """Ends the reply; returns the text that was held back, except a header without a message."""
        held, self._held = self._held, ""
        is_header = self._kind is None and held.startswith((START, CHANNEL, CONSTRAIN))
        if not is_header:
            kind = "reasoning" if self._kind == "reasoning" else "content"
            self._give(kind, held, is_call=self._kind == "call")
        return self._given()

    def _advance(self) -> bool:
        """Consumes one header or one piece of a message; False when more text is needed."""
        if self._kind is None:
            return self._take_header()
        if self._kind == "call":
            return self._take_call()
        end = first_possible(self._held, (*ENDS, START))
        self._give(self._kind, self._held[:end])
        self._held = self._held[end:]
        return self._take_end()

    def _take_header(self) -> bool:
        if not self._held:
            return False
        if not any(_may_begin(self._held, begin) for begin in _HEADER_BEGINS):
            self._kind = "content"
            return True
        header, found, body = self._held.partition(MESSAGE)
        if not found:
            return False
        self._kind = _kind(header)
        if self._kind == "call":
            prefix = "" if header.startswith(START) else START + _ROLE
            self._held = prefix + self._held
            return True
        self._must_part[self._kind] = self._has_given[self._kind]
        self._held = body
        return True

    def _take_call(self) -> bool:
        """Consumes a call, which is passed on in one piece."""
        behind_header = self._held.index(MESSAGE) + len(MESSAGE)
        end = first_possible(self._held, (*ENDS, START), behind_header)
        stop = next((end + len(mark) for mark in ENDS if self._held.startswith(mark, end)), end)
        if stop == end and not self._held.startswith(START, end):
            return False
        self._give("content", self._held[:stop], is_call=True)
        self._held, self._kind = self._held[stop:], None
        return True

    def _take_end(self) -> bool:
        mark = next((mark for mark in (*ENDS, START) if self._held.startswith(mark)), None)
        if mark is None:
            return False
        self._held = self._held if mark == START else self._held[len(mark) :]
        self._kind = None
        return True

    def _give(self, kind: str, text: str, *, is_call: bool = False) -> None:
        if not text:
            return
        if self._must_part[kind] and not is_call:
            self._parts[kind] += "\n"
            self._must_part[kind] = False
        self._parts[kind] += text
        self._has_given[kind] = self._has_given[kind] or not is_call

    def _given(self) -> Split:
        split = Split(**self._parts)
        self._parts = {"reasoning": "", "content": ""}
        return split


def _may_begin(text: str, begin: str) -> bool:
    return text.startswith(begin) or begin.startswith(text)


def _kind(header: str) -> str:
    if "to=" in header:
        return "call"
    return "reasoning" if header.partition(CHANNEL)[2].strip().startswith("analysis") else "content"
