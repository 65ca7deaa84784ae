"""The stream of OpenAI's chat completions: deltas of every choice as they come."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.call import Choice, Opening, Piece
from tailrace_gateway.core.openai_answers import (
    OpenAIStream,
    TokenText,
    logprob_entries,
    tool_calls_of,
)
from tailrace_gateway.core.openai_chat import ChatRequest


class ChatStream(OpenAIStream):
    """`StreamDialect` of chat completions."""

    def __init__(self, body: ChatRequest, tokens: TokenText) -> None:
        super().__init__(body, "chat.completion.chunk")
        self._chat = body
        self._tokens = tokens

    def begin(self, opening: Opening) -> bytes:
        """The role of every choice."""
        more = self.opened(opening)
        first = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(index, first, None, {}, more) for index in range(self._chat.num_choices)
        )

    def piece(self, piece: Piece) -> bytes:
        """Text and reasoning as they come; tokens without new text only for who wants tokens."""
        delta: dict[str, Any] = {}
        if piece.delta.content:
            delta["content"] = piece.delta.content
        if piece.delta.reasoning:
            delta["reasoning_content"] = piece.delta.reasoning
        told: dict[str, Any] = {}
        if self._chat.logprobs and len(piece.token_ids):
            told["logprobs"] = {"content": logprob_entries(self._tokens, piece)}
        if self._chat.return_token_ids and len(piece.token_ids):
            told["token_ids"] = piece.token_ids.tolist()
        return self._chunk(piece.index, delta, None, told) if delta or told else b""

    def choice(self, choice: Choice) -> bytes:
        """Tool calls, each whole, then the finish reason."""
        calls = [{"index": i, **call} for i, call in enumerate(tool_calls_of(choice))]
        told = [self._chunk(choice.index, {"tool_calls": [call]}, None) for call in calls]
        return b"".join([*told, self._chunk(choice.index, {}, choice.ending.value)])

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        told: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._chat.with_usage else {}
        return self.chunk([{**choice, **(told or {})}], **(more or {}), **usage)
