"""Episodes: the queued task and typed outcomes."""

import enum
from typing import Any

import msgspec

from tailrace_protos.base import Count, Finite, Message
from tailrace_protos.subjects import Phase

OVER_BUDGET = "over_budget"  # metric, 1 for an episode that was cut off by one of its limits


class StageSeconds(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of an episode's stages, summed over its calls; parallel calls all count."""

    prefill_s: float | None = None  # from request to first token: lease, wait in the server, prompt
    decode_s: float | None = None  # from first to last token; None: another process made the calls
    reward_s: float = 0.0
    room_s: float = 0.0  # before its start, in which no server had room; 0 also: not known


class Outcome(enum.StrEnum):
    """End of an episode. Only the first two carry a reward that training may use."""

    OK = "ok"
    POLICY_FAILURE = "policy_failure"  # caused by the model: unparsable, over budget
    INFRA_FAILURE = "infra_failure"  # environment, tool, server or worker failed
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_valid(self) -> bool:
        """True if rewards of such episodes enter statistics and training."""
        return self in (Outcome.OK, Outcome.POLICY_FAILURE)


class EnvTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """Task of an episode: the tag (environment or data set), the seed and the place in data order.

    `row` is the data set's row. It is empty on the queue; the worker fills it in, so that rewards can
    read it. `evaluation` names the evaluation that the task belongs to, if it has settings of its own.
    """

    env_name: str
    seed: int
    ordinal: int = -1  # number of the task in its tag's data order, from 0
    row: dict[str, Any] = {}
    greedy: bool = False  # play at temperature 0
    evaluation: str = ""


class Lease(msgspec.Struct, frozen=True):
    """One episode's server, valid until the episode ends or the server fails."""

    episode_id: str
    server_id: str
    nats_subject: str
    zmq_endpoint: str
    zmq_public_key: str = ""
    incarnation: str = ""
    ask_after_s: Finite = 0.0  # a turn after a tool call longer than this asks for its server; 0: none


class EpisodeTask(Message, frozen=True, tag="episode_task"):
    """One episode on the work queue."""

    episode_id: str  # "<group_id>.<member>"
    group_id: str
    member: Count
    attempt: Count  # raised when the scheduler publishes the episode again
    phase: Phase
    task: EnvTask
    deadline_unix_s: Finite
    timeout_s: Finite = 0.0  # from the first lease by an agent outside of the cluster; 0: its own alone
    lease: Lease | None = None  # its first server; None: the worker asks for one
    room_wait_s: Finite = 0.0  # since its admission, in which no server had room; 0 also: not known

    @property
    def message_id(self) -> str:
        """`Nats-Msg-Id` below the run's name: an id may not come twice in the dedup window."""
        return f"{self.episode_id}.{self.attempt}"
