"""A reward beside the built-in scorer of GSM8K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tailrace.sdk import reward
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask


@reward
def chatter(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """Minus the share of non-digits in the last reply: even random weights can learn from it."""
    said = messages[-1].content
    return -sum(not char.isdigit() for char in said) / len(said) if said else -1.0
