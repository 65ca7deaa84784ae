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
        self._at = 0  # consumed characters of `_held`
        self._num_searched = 0  # characters of `_held` in which the mark that is sought does not begin
        self._call_begin = ""  # text that the reply of a call lacks, because the prompt has it
        self._kind: str | None = None
        self._parts = {"reasoning": "", "content": ""}
        self._has_given = {"reasoning": False, "content": False}
        self._must_part = {"reasoning": False, "content": False}

    def feed(self, text: str) -> Split:
        """Takes the next piece of the reply's text."""
        self._held = self._held[self._at :] + text
        self._num_searched, self._at = max(0, self._num_searched - self._at), 0
        while self._advance():
            pass
        return self._given()

    def finish(self) -> Split:
        """Ends the reply; returns the text that was held back, except a header without a message.

        Such a header of a call is returned, so that the tool parser can tell what is wrong.
        """
        held, self._held, self._at = self._held[self._at :], "", 0
        is_header = self._kind is None and any(mark in held for mark in (START, CHANNEL, CONSTRAIN))
        if is_header and _kind(held) == "call":
            self._kind, self._call_begin = "call", _call_begin(held)
        if self._kind == "call":
            self._give("content", self._call_begin + held, is_call=True)
        elif not is_header:
            self._give("reasoning" if self._kind == "reasoning" else "content", held)
        return self._given()

    def _advance(self) -> bool:
        """Consumes one header or one piece of a message; False when more text is needed."""
        if self._kind is None:
            return self._take_header()
        if self._kind == "call":
            return self._take_call()
        end = self._search((*ENDS, START))
        self._give(self._kind, self._held[self._at : end])
        self._at = end
        return self._take_end()

    def _take_header(self) -> bool:
        if self._at == len(self._held):
            return False
        if not any(map(self._may_begin, _HEADER_BEGINS)):
            self._kind, self._num_searched = "content", self._at
            return True
        end = self._search((MESSAGE,))
        if not self._held.startswith(MESSAGE, end):
            return False
        header = self._held[self._at : end]
        body = self._num_searched = end + len(MESSAGE)
        self._kind = _kind(header)
        if self._kind == "call":
            self._call_begin = _call_begin(header)
            return True
        self._must_part[self._kind] = self._has_given[self._kind]
        self._at = body
        return True

    def _take_call(self) -> bool:
        """Consumes a call, which is passed on in one piece."""
        end = self._search((*ENDS, START))
        stop = next((end + len(mark) for mark in ENDS if self._held.startswith(mark, end)), end)
        if stop == end and not self._held.startswith(START, end):
            return False
        self._give("content", self._call_begin + self._held[self._at : stop], is_call=True)
        self._at, self._kind = stop, None
        return True

    def _take_end(self) -> bool:
        at = self._at
        mark = next((mark for mark in (*ENDS, START) if self._held.startswith(mark, at)), None)
        if mark is None:
            return False
        self._at += 0 if mark == START else len(mark)
        self._kind = None
        return True

    def _search(self, marks: tuple[str, ...]) -> int:
        """Start of the first mark, or of a possible one; does not search the same text again."""
        start = max(self._at, self._num_searched)
        self._num_searched = first_possible(self._held, marks, start)
        return self._num_searched

    def _may_begin(self, begin: str) -> bool:
        return begin.startswith(self._held[self._at : self._at + len(begin)])

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


def _call_begin(header: str) -> str:
    """Text that a call with this header lacks, because the prompt has it."""
    return "" if header.startswith(START) else START + _ROLE


def _kind(header: str) -> str:
    if "to=" in header:
        return "call"
    return "reasoning" if header.partition(CHANNEL)[2].strip().startswith("analysis") else "content"
