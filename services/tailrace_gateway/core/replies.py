"""A sampled reply as the client gets it: piece by piece while it comes, and whole at its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailrace.channel.tops import top_arrays
from tailrace.chat import ParsedReply, ReplyStream
from tailrace_gateway.core.call import Ending, Piece
from tailrace_gateway.core.running import RunningCall
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import FinishReason, TokenChunk

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)


class ReplyTeller:
    """Turns the chunks of one choice into pieces for a stream; nothing is said twice."""

    def __init__(self, running: RunningCall, index: int, stream: ReplyStream) -> None:
        self._running = running
        self._index = index
        self._stream = stream

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Pass new tokens on."""
        token_ids = as_int32(chunk.token_ids)
        delta = self._stream.feed(token_ids)
        logprobs = as_float32(chunk.inference_logprobs)
        self._running.say(Piece(self._index, delta, token_ids, logprobs, *top_arrays(chunk)))

    def finish(self) -> ParsedReply:
        """The whole reply; what was held back until its end is said now."""
        parsed = self._stream.finish()
        if parsed.rest.content or parsed.rest.reasoning:
            self._running.say(Piece(self._index, parsed.rest, _NO_IDS, _NO_LOGPROBS))
        return parsed


def ending_of(message: ChatMessage, finish_reason: FinishReason | None) -> Ending:
    """Why a choice ended, as clients are told."""
    if finish_reason is FinishReason.LENGTH:
        return Ending.LENGTH
    return Ending.TOOL_CALLS if message.tool_calls else Ending.STOP
