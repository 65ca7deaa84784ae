"""Sentinels: stand-ins for the texts of a conversation, which show where a template puts them."""

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
    """Stand-in for the system message at the beginning of the conversation, if there is one."""
    role = history[0].role
    return (ChatMessage(role, "SentinelSystemText"),) if role in _SYSTEM_ROLES else ()


def sentinel_reply(reply: ChatMessage, *, writes_calls: bool) -> ChatMessage:
    """Reply with sentinels for its content and arguments; names and ids stay."""
    calls = tuple(
        ToolCall(call.id, call.name, json.dumps({"text": f"{_ARGUMENT}{index}."}))
        for index, call in enumerate(reply.tool_calls)
    )
    is_silent = bool(calls) and writes_calls and not reply.content
    return ChatMessage("assistant", "" if is_silent else _REPLY, calls)


def nameless_reply(reply: ChatMessage) -> ChatMessage:
    """Reply with stand-ins for names and ids of its calls too."""
    calls = tuple(
        ToolCall(_call_id(index), _call_name(index), call.arguments)
        for index, call in enumerate(reply.tool_calls)
    )
    return msgspec.structs.replace(reply, tool_calls=calls)


def named(text: str, reply: ChatMessage) -> str:
    """Puts the reply's own names and ids into the text of a `nameless_reply`."""
    for index, call in enumerate(reply.tool_calls):
        text = text.replace(_call_id(index), call.id).replace(_call_name(index), call.name)
    return text


def sentinel_message(index: int, message: ChatMessage, reply: ChatMessage) -> ChatMessage:
    """Message with sentinels for its texts; an answered call is named by its stand-in."""
    places = {call.id: place for place, call in enumerate(reply.tool_calls)}
    place = places.get(message.tool_call_id, -1)
    is_known = place >= 0
    return msgspec.structs.replace(
        message,
        content=f"SentinelNewText{index}." if message.content else "",
        reasoning=f"SentinelNewReasoning{index}." if message.reasoning else "",
        tool_call_id=_call_id(place) if is_known else message.tool_call_id,
        name=_call_name(place) if is_known and message.name else message.name,
    )


def _call_id(index: int) -> str:
    return f"snt{index:06}"  # Mistral's templates accept nine characters only


def _call_name(index: int) -> str:
    return f"SentinelName{index}x"


def reply_span(text: str, reply: ChatMessage) -> tuple[int, int] | None:
    """Start of the first and end of the last sentinel of `reply` in `text`."""
    sentinels = [_REPLY, *(f"{_ARGUMENT}{index}." for index in range(len(reply.tool_calls)))]
    found = [(text.find(sentinel), len(sentinel)) for sentinel in sentinels]
    places = [(start, start + size) for start, size in found if start >= 0]
    if not places:
        return None
    return min(start for start, _ in places), max(stop for _, stop in places)
