"""Parts of an episode: sampling parameters, fatal errors, the result."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from tailrace.sdk.policy import GenerationFailedError
from tailrace_agents.core.transcript import SessionTranscript, Transcript
from tailrace_agents.ports import EpisodeTakenError
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import Outcome, StageSeconds
from tailrace_protos.generation import SamplingParams

_MASK_64 = (1 << 64) - 1


class SamplingPlan(NamedTuple):
    """Sampling parameters of every turn; with a seed each turn has its own, always the same."""

    params: SamplingParams
    seed: int | None = None

    def for_turn(self, turn: int) -> SamplingParams:
        """Returns the parameters of turn `turn`."""
        if self.seed is None:
            return self.params
        return msgspec.structs.replace(self.params, seed=mix_seed(self.seed, turn))


def mix_seed(*parts: int) -> int:
    """Mixes a 63-bit seed that depends on every part and on their order (splitmix64)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 1


async def _nothing() -> None:
    """Default of `EpisodeResult.after_settlement`."""


@dataclass(slots=True)
class EpisodeResult:
    """A finished episode: outcome, transcript, and the inputs of rewards."""

    outcome: Outcome = Outcome.OK
    reason: str = ""
    transcript: Transcript = field(default_factory=SessionTranscript)
    messages: Sequence[ChatMessage] = ()  # user, assistant, user, ...
    metrics: dict[str, float] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)  # of the data set, for rewards
    num_replayed_turns: int = 0
    num_restarts: int = 0  # restarts because a replay did not fit the journal
    deadline_unix_s: float = 0.0
    stages: StageSeconds = field(default_factory=StageSeconds)
    after_settlement: Callable[[], Awaitable[None]] = _nothing
    """Frees what another worker needs if this one dies before it has settled the episode."""


class EpisodeHandedBackError(Exception):
    """The worker drains: the episode stops between two turns, and another worker resumes it."""


class EpisodeInfraError(Exception):
    """A part of the system failed; the episode ends as an infrastructure failure."""


class ToolInfraError(EpisodeInfraError):
    """A tool failed without a result. Attributes: `tool`, `reason`."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"tool {tool}: {reason}")
        self.tool = tool
        self.reason = reason


FatalError = GenerationFailedError | EpisodeTakenError | EpisodeHandedBackError | EpisodeInfraError


class FatalErrorLatch:
    """Keeps the first fatal error raised in `with latch:` and raises it again at later calls.

    A loop may catch an exception and go on; it cannot hide a fatal error from the machine. After the
    episode's end, calls of what the loop left behind (a task, a thread) fail too.
    """

    __slots__ = ("error", "has_ended")

    def __init__(self) -> None:
        self.error: FatalError | None = None
        self.has_ended = False

    def end(self) -> None:
        """Refuses all later calls."""
        self.has_ended = True
        self.error = self.error or EpisodeInfraError("the episode has ended")

    def require_running(self) -> None:
        """Raises the fatal error after the end: the answer to a call came too late."""
        if self.has_ended and self.error is not None:
            raise self.error

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.error is None and isinstance(error, FatalError):
            self.error = error
