"""Stand-ins for the texts of a conversation, which say where a template puts them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from tailrace_protos.chat import ChatMessage, ToolCall

USER = ChatMessage("user", "SentinelUserText")
EARLIER = (ChatMessage("user", "SentinelEarlierText"), ChatMessage("assistant", "SentinelEarlierReply"))
REASONING = "SentinelReasoning"
_REPLY = "SentinelReplyText"
_ARGUMENT = "SentinelReplyArgument"
_SYSTEM_ROLES = ("system", "developer")


def system_before(history: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """A stand-in for the system message that the conversation begins with, if it has one."""
    role = history[0].role
    return (ChatMessage(role, "SentinelSystemText"),) if role in _SYSTEM_ROLES else ()


def sentinel_reply(reply: ChatMessage, *, writes_calls: bool) -> ChatMessage:
    """The reply with sentinels for its content and its arguments; names and ids stay."""
    calls = tuple(
        ToolCall(call.id, call.name, json.dumps({"text": f"{_ARGUMENT}{index}."}))
        for index, call in enumerate(reply.tool_calls)
    )
    is_silent = bool(calls) and writes_calls and not reply.content
    return ChatMessage("assistant", "" if is_silent else _REPLY, calls)


def sentinel_message(index: int, message: ChatMessage) -> ChatMessage:
    """A message with sentinels for its texts."""
    return msgspec.structs.replace(
        message,
        content=f"SentinelNewText{index}." if message.content else "",
        reasoning=f"SentinelNewReasoning{index}." if message.reasoning else "",
    )


def reply_span(text: str, reply: ChatMessage) -> tuple[int, int] | None:
    """Begin of the first and end of the last sentinel of `reply` in `text`."""
    sentinels = [_REPLY, *(f"{_ARGUMENT}{index}." for index in range(len(reply.tool_calls)))]
    found = [(text.find(word), len(word)) for word in sentinels]
    places = [(start, start + size) for start, size in found if start >= 0]
    if not places:
        return None
    return min(start for start, _ in places), max(stop for _, stop in places)
