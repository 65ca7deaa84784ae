"""Prompt of a judge, and the score in its reply (pure)."""

import re
from collections.abc import Sequence
from typing import Any

from tailrace_protos.chat import ChatMessage
from tailrace_protos.reward import ScoreItem
from tailrace_reward.config import JudgeArgs


class NoScoreError(ValueError):
    """Reply without a score, with the reason."""


TEMPLATE_NAMES = frozenset(("conversation", "question", "answer", "messages", "row", "metrics"))
"""Names that the template of a prompt may use."""


def template_names(item: ScoreItem) -> dict[str, Any]:
    """Values of `TEMPLATE_NAMES`."""
    return {
        "conversation": conversation(item.messages),
        "question": _first(item.messages, "user"),
        "answer": _first(reversed(item.messages), "assistant"),
        "messages": [{"role": each.role, "content": each.content} for each in item.messages],
        "row": item.task.row,
        "metrics": item.metrics,
    }


def conversation(messages: Sequence[ChatMessage]) -> str:
    """The messages as text, one after another under their roles; calls of tools as they were made."""
    return "\n\n".join(f"[{message.role}]\n{_said(message)}" for message in messages)


def read_score(reply: str, args: JudgeArgs) -> float:
    """The score in a reply; raises `NoScoreError`."""
    found = re.findall(args.score_pattern, reply)
    if not found:
        raise NoScoreError(f"no match of {args.score_pattern!r} in {_shortened(reply)!r}")
    try:
        score = float(found[-1])
    except ValueError as error:
        raise NoScoreError(f"{found[-1]!r} is no number") from error
    if not args.min_score <= score <= args.max_score:
        raise NoScoreError(f"{score:g} lies outside {args.min_score:g} to {args.max_score:g}")
    return score


def _said(message: ChatMessage) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))


def _first(messages: Any, role: str) -> str:
    return next((message.content for message in messages if message.role == role), "")


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"...{text[-197:]}"
