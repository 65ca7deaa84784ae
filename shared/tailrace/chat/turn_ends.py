"""Which tokens end an assistant's turn, by what the template writes behind replies."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.chat.continuation import Continuations
from tailrace.chat.pieces import TemplateNotAppendableError
from tailrace.chat.sentinels import USER, reply_span, sentinel_reply
from tailrace.chat.special import SpecialTokens
from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace_protos.chat import ChatMessage, ToolCall

_CALL = ToolCall("sentinel1", "probe", "{}")
_REPLIES = (
    ChatMessage("assistant", "SentinelReply"),
    ChatMessage("assistant", tool_calls=(_CALL,)),
)


class TurnEnds(NamedTuple):
    """Tokens that end turns."""

    stop_ids: frozenset[int]  # a model that samples one has ended its turn
    closing_ids: frozenset[int]  # a turn with such a last token needs no end of turn inserted
    plain_id: int  # the one behind a reply that calls no tool; -1: there is none


def find_turn_ends(
    template: ChatTemplate, special: SpecialTokens, continuations: Continuations
) -> TurnEnds:
    """The ends of a plain reply and of one that calls a tool."""
    replies = _REPLIES if template.call_text else _REPLIES[:1]
    last_ids = [_last_special(template, special, reply) for reply in replies]
    stop_ids = frozenset(token_id for token_id in last_ids if token_id >= 0)
    closing_ids = stop_ids.union(*(_closing(continuations, reply) for reply in replies))
    return TurnEnds(stop_ids, closing_ids, last_ids[0])


def _last_special(template: ChatTemplate, special: SpecialTokens, reply: ChatMessage) -> int:
    """The special token that a conversation ends with when the reply is its last message, or -1."""
    shape = sentinel_reply(reply, writes_calls=True)
    try:
        text = template.render((USER, shape), add_generation_prompt=False)
    except TemplateError:
        return -1
    span = reply_span(text, shape)
    behind = text[span[1] :] if span else ""
    spans = special.spans(behind)
    return special.ids[behind[slice(*spans[-1])]] if spans else -1


def _closing(continuations: Continuations, reply: ChatMessage) -> frozenset[int]:
    answer = ChatMessage("tool", "SentinelResult", tool_call_id=_CALL.id, name=_CALL.name)
    new = answer if reply.tool_calls else ChatMessage("user", "SentinelNext")
    try:
        return continuations.insertion((USER, reply), (new,)).end_ids
    except TemplateNotAppendableError:
        return frozenset()
