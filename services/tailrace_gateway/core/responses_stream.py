"""The stream of OpenAI's responses: items one after the other, events numbered, all at its end."""

from __future__ import annotations

from typing import Any

from tailrace_gateway.core.call import Choice, Completion, Ending, Opening, Piece
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.openai_answers import TokenText
from tailrace_gateway.core.openai_responses import (
    ResponseRequest,
    response_answer,
    response_base,
)
from tailrace_gateway.core.responses_items import (
    call_item,
    message_item,
    reasoning_item,
    text_part,
)
from tailrace_gateway.core.sse import named_event
from tailrace_protos.chat import ToolCall


class ResponseStream:
    """`StreamDialect` of responses. One item is open at a time; tool calls come whole, at the end."""

    def __init__(self, body: ResponseRequest, tokens: TokenText) -> None:
        self._body = body
        self._tokens = tokens
        self._number = 0
        self._index = -1  # of the newest item
        self._open = ""  # its type; empty: it was closed
        self._text = ""  # of the open item
        self._suffix = ""

    def begin(self, opening: Opening) -> bytes:
        """The response without output."""
        self._suffix = opening.completion_id
        response = response_base(self._body, opening.completion_id, opening.created_unix_s)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(self, piece: Piece) -> bytes:
        """Thoughts and text as they come."""
        told = b""
        if piece.delta.reasoning:
            told += self._opened("reasoning") + self._said(piece.delta.reasoning)
        if piece.delta.content:
            told += self._opened("message") + self._said(piece.delta.content)
        return told

    def choice(self, choice: Choice) -> bytes:
        """The end of the open item, and tool calls."""
        calls = choice.message.tool_calls
        told = self._opened("message") if self._index < 0 and not calls else b""
        return told + self._closed() + b"".join(map(self._call, calls))

    def end(self, completion: Completion) -> bytes:
        """The whole response."""
        is_cut = completion.choices[0].ending is Ending.LENGTH
        kind = "response.incomplete" if is_cut else "response.completed"
        return self._event(kind, response=response_answer(self._body, completion, self._tokens))

    def error(self, error: ApiError) -> bytes:
        """An error event, which the client raises."""
        param = error.param or None
        return self._event("error", code=error.code, message=error.message, param=param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(event)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item's content."""
        prefix = "rs" if self._open == "reasoning" else "msg"
        return self._event(
            kind,
            item_id=f"{prefix}_{self._suffix}",
            output_index=self._index,
            content_index=0,
            **fields,
        )

    def _opened(self, kind: str) -> bytes:
        """Make sure that an item of this type is open."""
        if self._open == kind:
            return b""
        told = self._closed()
        self._index, self._open, self._text = self._index + 1, kind, ""
        item = self._item("in_progress")
        told += self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "message":
            told += self._of_item("response.content_part.added", part=text_part(""))
        return told

    def _said(self, text: str) -> bytes:
        self._text += text
        if self._open == "reasoning":
            return self._of_item("response.reasoning_text.delta", delta=text)
        return self._of_item("response.output_text.delta", delta=text, logprobs=[])

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        if self._open == "reasoning":
            told = self._of_item("response.reasoning_text.done", text=self._text)
        else:
            told = self._of_item("response.output_text.done", text=self._text, logprobs=[])
            told += self._of_item("response.content_part.done", part=text_part(self._text))
        item = self._item("completed")
        told += self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = ""
        return told

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as far as it was told."""
        if self._open == "reasoning":
            return reasoning_item(self._suffix, self._text, status)
        parts = [text_part(self._text)] if status == "completed" else []
        return message_item(self._suffix, parts, status)

    def _call(self, call: ToolCall) -> bytes:
        self._index += 1
        place = {"output_index": self._index}
        begun = call_item(ToolCall(call.id, call.name, ""), "in_progress")
        told = self._event("response.output_item.added", item=begun, **place)
        place_of_item = {"item_id": begun["id"], **place}
        kind = "response.function_call_arguments"
        told += self._event(f"{kind}.delta", delta=call.arguments, **place_of_item)
        told += self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **place_of_item)
        return told + self._event("response.output_item.done", item=call_item(call), **place)
