"""Anthropic's stream: a message, its blocks one after the other, and why it ended."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.anthropic_errors import anthropic_error
from tailrace_gateway.core.anthropic_messages import (
    MessagesRequest,
    ending_fields,
    tool_use_block,
    usage_of,
)
from tailrace_gateway.core.call import Choice, Completion, Opening, Piece
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.sse import named_event, to_json
from tailrace_protos.chat import ToolCall


class MessagesStream:
    """`StreamDialect` of messages. One block is open at a time; tool calls come whole, at the end."""

    def __init__(self, body: MessagesRequest) -> None:
        self._body = body
        self._index = -1  # of the newest block
        self._open = ""  # its type; empty: it was closed
        self._ending: dict[str, Any] = {}

    def begin(self, opening: Opening) -> bytes:
        """The message without content."""
        usage = {"input_tokens": len(opening.prompt_ids), "output_tokens": 0}
        message: dict[str, Any] = {
            "id": opening.completion_id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_event({"type": "message_start", "message": message})

    def piece(self, piece: Piece) -> bytes:
        """Thoughts and text as they come."""
        told = b""
        if piece.delta.reasoning and self._body.tells_thoughts:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": piece.delta.reasoning}
            told += self._block("thinking", empty) + self._delta(delta)
        if piece.delta.content:
            delta = {"type": "text_delta", "text": piece.delta.content}
            told += self._block("text", {"type": "text", "text": ""}) + self._delta(delta)
        return told

    def choice(self, choice: Choice) -> bytes:
        """Tool calls, and the end of the last block."""
        self._ending = ending_fields(choice)
        calls = choice.message.tool_calls
        told = b"".join(map(self._tool_use, calls))
        if self._index < 0:
            told += self._block("text", {"type": "text", "text": ""})
        return told + self._close()

    def end(self, completion: Completion) -> bytes:
        """Why it ended, and the counts."""
        delta = {"type": "message_delta", "delta": self._ending, "usage": usage_of(completion)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        """An error event, which the client raises."""
        return named_event(anthropic_error(error))

    def _tool_use(self, call: ToolCall) -> bytes:
        block = tool_use_block(call.id, call.name, call.arguments)
        arguments = to_json(block["input"]).decode()
        begun = self._close() + self._block("tool_use", {**block, "input": {}})
        return begun + self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Make sure that a block of this type is open."""
        if self._open == kind:
            return b""
        told = self._close()
        self._index += 1
        self._open = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": empty}
        return told + named_event(start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return named_event({"type": "content_block_stop", "index": self._index})
