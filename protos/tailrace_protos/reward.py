"""Scoring of finished episodes; a score is a pure function of its request."""

import msgspec

from tailrace_protos.base import Finite, Message
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.generation import CallError


class ScoreItem(msgspec.Struct, frozen=True):
    """One finished episode to be scored."""

    episode_id: str
    task: EnvTask
    messages: tuple[ChatMessage, ...]
    turn_rewards: tuple[Finite, ...]
    metrics: dict[str, Finite]


class ScoreRequest(Message, frozen=True, tag="score_request"):
    """Episodes to score; several in one message cost one round trip."""

    items: tuple[ScoreItem, ...]


class Score(msgspec.Struct, frozen=True):
    """`reward` is the weighted sum of `components`; with `error` there is no reward."""

    episode_id: str
    reward: Finite = 0.0
    components: dict[str, Finite] = msgspec.field(default_factory=dict)
    error: CallError | None = None


class ScoreReply(Message, frozen=True, tag="score_reply"):
    """Scores in the order of the request's items."""

    scores: tuple[Score, ...]
