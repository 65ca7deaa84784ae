"""Stream of a sampled reply: reasoning, content and tool calls, read while tokens arrive.

Invariants: text that `feed` returned is never taken back. All deltas together with `ParsedReply.rest`
are the texts of the final message, however the tokens were cut. No text of a model raises an error.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.chat.reasoning import ReasoningSplitter, Split
from tailrace.chat.text_stream import StopText, TokenText
from tailrace.chat.tool_parsers import FoundCall, ToolParser
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  # Mistral's templates accept only this length


class ReplyDelta(NamedTuple):
    """Newly certain text of a reply."""

    content: str = ""
    reasoning: str = ""


class ParsedReply(NamedTuple):
    """Complete reply. `malformed`: errors of malformed calls, for the model; empty: none.

    `rest`: text that `ReplyStream.feed` did not return before.
    """

    message: ChatMessage
    malformed: str = ""
    num_malformed: int = 0
    rest: ReplyDelta = ReplyDelta()


class ReplyStream:
    """Stream of one reply. `finish` returns the tool calls."""

    def __init__(
        self,
        text: TokenText,
        stop: StopText,
        splitter: ReasoningSplitter,
        parser: ToolParser,
        tools: Sequence[ToolSchema],
        id_seed: str,
    ) -> None:
        self._text = text
        self._stop = stop
        self._splitter = splitter
        self._parser = parser
        self._tools = tools
        self._id_seed = id_seed
        self._reasoning: list[str] = []
        self._content = ""  # tool calls included
        self._num_certain = 0
        self._num_given = 0

    def feed(self, token_ids: NDArray[np.int32] | Sequence[int]) -> ReplyDelta:
        """Takes newly sampled ids [t]."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        split = self._splitter.feed(self._stop.feed(self._text.feed(ids)))
        self._take(split)
        return ReplyDelta(self._certain_content(), split.reasoning)

    def finish(self) -> ParsedReply:
        """Ends the reply; returns it as a message."""
        rest = self._stop.feed(self._text.finish()) + self._stop.finish()
        last = self._splitter.feed(rest), self._splitter.finish()
        for split in last:
            self._take(split)
        parsed = self._parser.parse(self._content, self._tools)
        calls = tuple(self._call(index, call) for index, call in enumerate(parsed.calls))
        return ParsedReply(
            ChatMessage("assistant", parsed.content, calls, reasoning="".join(self._reasoning)),
            "\n".join(parsed.malformed),
            len(parsed.malformed),
            ReplyDelta(parsed.content[self._num_given :], "".join(s.reasoning for s in last)),
        )

    def _take(self, split: Split) -> None:
        self._reasoning.append(split.reasoning)
        self._content += split.content

    def _certain_content(self) -> str:
        """Content before any text that may be a tool call, without white space at its end."""
        self._num_certain = self._parser.certain(self._content, self._num_certain)
        delta = self._content[self._num_given : self._num_certain].rstrip()
        self._num_given += len(delta)
        return delta

    def _call(self, index: int, call: FoundCall) -> ToolCall:
        return ToolCall(call.call_id or _call_id(self._id_seed, index, call), call.name, call.arguments)


def _call_id(seed: str, index: int, call: FoundCall) -> str:
    """Id of a call, a hash of call and seed: a reply that is parsed again gets the same ids."""
    text = f"{seed}\0{index}\0{call.name}\0{call.arguments}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    chars = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARS))
        chars.append(_ID_CHARS[digit])
    return "".join(chars)
