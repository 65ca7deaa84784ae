"""Episodes: the queued task, the journal of finished turns, and typed outcomes."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from tailrace_protos.base import Float32Bytes, Int32Bytes, Message
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.subjects import Phase

OVER_BUDGET = "over_budget"  # metric, 1 for an episode that was cut off by one of its limits


class Outcome(enum.StrEnum):
    """End of an episode. Only the first two carry a reward that may be learnt from."""

    OK = "ok"
    POLICY_FAILURE = "policy_failure"  # the model's own doing: unparsable, over budget
    INFRA_FAILURE = "infra_failure"  # environment, tool, server or worker failed
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_valid(self) -> bool:
        """Tell whether rewards of such episodes enter statistics and training."""
        return self in (Outcome.OK, Outcome.POLICY_FAILURE)


class EnvTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """Task to play: its tag (environment or data set) and the values that fix it.

    `row` is the data set's row; it is empty on the queue and filled in by who plays the episode, so
    that rewards can read it.
    """

    env_name: str
    seed: int
    ordinal: int = -1  # the how-many-th task of this tag in data order, from 0
    row: dict[str, Any] = {}


class EpisodeTask(Message, frozen=True, tag="episode_task"):
    """One episode on the work queue."""

    episode_id: str  # "<group_id>.<member>"
    group_id: str
    member: int
    attempt: int  # raised when the scheduler publishes the episode again
    phase: Phase
    task: EnvTask
    deadline_unix_s: float

    @property
    def message_id(self) -> str:
        """`Nats-Msg-Id` below the run's name: an id may not come twice in the dedup window."""
        return f"{self.episode_id}.{self.attempt}"


class TurnRecord(Message, frozen=True, tag="turn_record"):
    """One finished turn in an episode's journal: enough to replay it without sampling again."""

    turn: int
    observation_ids: Int32Bytes  # [o] inserted by the renderer before this turn's sample
    token_ids: Int32Bytes  # [t] sampled
    inference_logprobs: Float32Bytes  # [t]
    spans: tuple[TokenSpan, ...]
    finish_reason: FinishReason
    reply: str  # text the environment's action was parsed from
    reward: float
    terminated: bool
    truncated: bool
