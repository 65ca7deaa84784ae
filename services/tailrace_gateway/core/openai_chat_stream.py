"""The stream of OpenAI's chat completions: deltas of every choice as they come."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.call import Choice, Completion, Opening, Piece
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.openai_chat import ChatRequest, num_choices
from tailrace_gateway.core.openai_errors import openai_error
from tailrace_gateway.core.openai_fields import (
    TokenText,
    logprob_entries,
    tool_calls_of,
    usage_of,
)
from tailrace_gateway.core.sse import DONE, data_event


class ChatStream:
    """`StreamDialect` of chat completions."""

    def __init__(self, body: ChatRequest, tokens: TokenText) -> None:
        self._body = body
        self._tokens = tokens
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._base: dict[str, Any] = {}

    def begin(self, opening: Opening) -> bytes:
        """The role of every choice."""
        self._base = {
            "id": opening.completion_id,
            "object": "chat.completion.chunk",
            "created": opening.created_unix_s,
            "model": self._body.model,
        }
        first = {"role": "assistant", "content": ""}
        more = {"prompt_token_ids": opening.prompt_ids.tolist()} if self._body.return_token_ids else {}
        indices = range(num_choices(self._body))
        return b"".join(self._chunk(index, dict(first), None, {}, more) for index in indices)

    def piece(self, piece: Piece) -> bytes:
        """Text and reasoning as they come; tokens without new text only for who wants tokens."""
        delta: dict[str, Any] = {}
        if piece.delta.content:
            delta["content"] = piece.delta.content
        if piece.delta.reasoning:
            delta["reasoning_content"] = piece.delta.reasoning
        told: dict[str, Any] = {}
        if self._body.logprobs and len(piece.token_ids):
            entries = logprob_entries(self._tokens, piece.token_ids, piece.logprobs)
            told["logprobs"] = {"content": entries}
        if self._body.return_token_ids and len(piece.token_ids):
            told["token_ids"] = piece.token_ids.tolist()
        return self._chunk(piece.index, delta, None, told) if delta or told else b""

    def choice(self, choice: Choice) -> bytes:
        """Tool calls, each whole, then the finish reason."""
        calls = [{"index": i, **call} for i, call in enumerate(tool_calls_of(choice))]
        told = [self._chunk(choice.index, {"tool_calls": [call]}, None) for call in calls]
        return b"".join([*told, self._chunk(choice.index, {}, choice.ending.value)])

    def end(self, completion: Completion) -> bytes:
        """Usage if it was asked for."""
        if not self._with_usage:
            return DONE
        return data_event({**self._base, "choices": [], "usage": usage_of(completion)}) + DONE

    def error(self, error: ApiError) -> bytes:
        """An error object in place of a chunk, which the client raises."""
        return data_event(openai_error(error))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        told: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._base, "choices": [{**choice, **(told or {})}], **(more or {})}
        if self._with_usage:
            chunk["usage"] = None
        return data_event(chunk)
