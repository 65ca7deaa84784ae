"""References of responses to items of earlier answers: resolved in the session, then merged.

One reply of the model gives several items: reasoning, text and calls. Adjacent assistant items form one
message.
"""

from collections.abc import Iterable, Sequence

from tailrace_gateway.core.call import ItemReference
from tailrace_gateway.core.errors import NotFoundError
from tailrace_gateway.core.session import Session
from tailrace_protos.chat import ChatMessage


def merged(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages with each run of assistant messages as one."""
    read: list[ChatMessage] = []
    for message in messages:
        if read and message.role == "assistant" and read[-1].role == "assistant":
            message = _joined(read.pop(), message)
        read.append(message)
    return tuple(read)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return ChatMessage(
        "assistant",
        "\n".join(filter(None, (first.content, second.content))),
        (*first.tool_calls, *second.tool_calls),
        reasoning="\n".join(filter(None, (first.reasoning, second.reasoning))),
    )


def resolved(session: Session, items: Sequence[ChatMessage | ItemReference]) -> tuple[ChatMessage, ...]:
    """Return the messages of a request whose references name answers of this session."""
    return merged(
        _referred(session, item) if isinstance(item, ItemReference) else item for item in items
    )


def _referred(session: Session, reference: ItemReference) -> ChatMessage:
    kind, _, name = reference.item_id.partition("_")
    if kind == "fc":
        call = session.find_tool_call(name)
        if call is not None:
            return ChatMessage("assistant", tool_calls=(call,))
    completion_id, _, later = name.partition("_")
    if kind in ("rs", "msg") and session.has_call(completion_id):
        reply = session.node(completion_id).reply
        if later:  # a further item of a stream: the first one stands for the whole text
            return ChatMessage("assistant")
        if kind == "rs":
            return ChatMessage("assistant", reasoning=reply.reasoning)
        return ChatMessage("assistant", reply.content)
    reason = f"{reference.place}: no answer of this session has an item {reference.item_id!r}"
    raise NotFoundError(reason, param=reference.place)
