"""Constant text around messages, found once by rendering conversations of sentinels.

A template is appendable if a longer conversation begins with the text of the shorter one and every
further turn inserts the same text. Then a turn costs one string join instead of one rendering of the
whole conversation, and the tokens of earlier turns do not change.
"""

from typing import NamedTuple

from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace_protos.chat import ChatMessage

_SENTINELS = tuple(f"Sentinel{index}Message" for index in range(5))


class TemplateNotAppendableError(TemplateError):
    """Rendering one more turn changes the text of earlier ones."""


class ChatPieces(NamedTuple):
    """Texts around messages: `opening` user `reply_prompt` reply `between` user `reply_prompt` ..."""

    opening: str
    reply_prompt: str  # end of the user's message and beginning of the assistant's
    between: str  # end of the assistant's message and beginning of the next user's
    trims: bool  # the template strips white space around the user's text


def derive_pieces(template: ChatTemplate) -> ChatPieces:
    """Finds the pieces, or raises `TemplateNotAppendableError` with the place that differs."""
    opening, reply_prompt = _split(template, 1)
    second = _split(template, 3)
    _require_same(template, "the text before the first user message", second[0], opening)
    _require_same(template, "the text before an assistant message", second[1], reply_prompt)
    between = second[2]
    _require_same(template, "the second generation prompt", second[3], reply_prompt)
    third = _split(template, 5)
    for index, expected in enumerate(
        (opening, reply_prompt, between, reply_prompt, between, reply_prompt)
    ):
        _require_same(
            template, f"piece {index} of a conversation of three turns", third[index], expected
        )
    return ChatPieces(opening, reply_prompt, between, _trims(template, opening, reply_prompt))


def _conversation(num_messages: int) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [ChatMessage(roles[index % 2], _SENTINELS[index]) for index in range(num_messages)]


def _split(template: ChatTemplate, num_messages: int) -> list[str]:
    """Texts before, between and after the sentinels of a conversation that ends with the user."""
    rest = template.render(_conversation(num_messages), add_generation_prompt=True)
    pieces = []
    for sentinel in _SENTINELS[:num_messages]:
        before, found, rest = rest.partition(sentinel)
        if not found or sentinel in rest:
            raise TemplateNotAppendableError(
                template.name, "messages do not appear exactly once, in order, in the rendered text"
            )
        pieces.append(before)
    return [*pieces, rest]


def _require_same(template: ChatTemplate, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise TemplateNotAppendableError(
            template.name,
            f"cannot be appended to: {what} is {found!r} where a shorter conversation has {expected!r}",
        )


def _trims(template: ChatTemplate, opening: str, reply_prompt: str) -> bool:
    padded = f" \n{_SENTINELS[0]}\n "
    text = template.render([ChatMessage("user", padded)], add_generation_prompt=True)
    if text == opening + padded + reply_prompt:
        return False
    if text == opening + padded.strip() + reply_prompt:
        return True
    raise TemplateNotAppendableError(
        template.name, "changes the white space of messages in a way not known here"
    )
