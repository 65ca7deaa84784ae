"""Agent loops: user code that plays a row of a data set, turn by turn, with the model.

Training uses the tokens that the engine sampled, whatever a loop does: `chat` and `generate` keep them
in the episode's ledger, and rows are exported from there. Several calls may run at once
(`asyncio.gather`). If a worker dies, another worker runs the loop again from the start, and recorded
calls are answered from the journal. So a loop should depend on nothing but its row and the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import FinishReason, SamplingParams
from tailrace_protos.tool import ToolResult

if TYPE_CHECKING:  # rewards and tools import this package where no tokenizer is installed
    from tailrace.chat import Renderer


class EpisodeOverError(Exception):
    """A limit of the episode is used up. If the loop lets it through, the episode is a policy failure.

    Attributes: `limit` (the configuration key), `reason`.
    """

    def __init__(self, limit: str, reason: str) -> None:
        super().__init__(f"{limit}: {reason}")
        self.limit = limit
        self.reason = reason


class LoopLimits(NamedTuple):
    """Limits of one episode."""

    max_episode_tokens: int  # of one conversation, inserted and sampled together
    max_new_tokens: int  # sampled, over all calls
    max_tokens_per_step: int  # sampled, in one call; 0: what is left of the others
    max_turns: int  # model calls
    wall_clock_s: float
    max_tool_s: float  # time with a tool at work
    tool_timeout_s: float  # one tool call
    max_tool_output_chars: int  # of one tool result; 0: no bound


class Remaining(NamedTuple):
    """Rest of an episode's limits."""

    turns: int
    new_tokens: int
    wall_clock_s: float
    tool_s: float


class ChatReply(NamedTuple):
    """Reply of the model. `malformed` says why a tool call could not be read."""

    message: ChatMessage
    finish_reason: FinishReason
    malformed: str
    completion_id: str
    num_tokens: int


class LoopTools(Protocol):
    """Tools of an episode: those that its row names."""

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Descriptions of the tools for the model."""

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Runs one call. Errors that a model can read come as a result; others end the episode."""


class EpisodeEnd(NamedTuple):
    """End of an episode as its loop decides it; rewards are set with `EpisodePolicy.set_reward`."""

    outcome: Outcome = Outcome.OK
    reason: str = ""
    metrics: Mapping[str, float] = MappingProxyType({})


LoopResult = EpisodeEnd | float | Mapping[str, float] | None


class EpisodePolicy(Protocol):
    """Model, tools and transcript of one episode."""

    __slots__ = ()

    tools: LoopTools
    """The tools that the row names."""

    limits: LoopLimits
    """Limits of the whole episode."""

    @property
    def episode_id(self) -> str:
        """`<group>.<member>`."""

    @property
    def renderer(self) -> Renderer:
        """Text to token ids and back."""

    @property
    def remaining(self) -> Remaining:
        """Rest of the limits now."""

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> ChatMessage:
        """Answers a conversation; raises `EpisodeOverError` if a limit is used up."""
        return (await self.complete(messages, tools)).message

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """Answers as `chat` does, with the finish reason, the completion id and what was malformed."""

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Continues token ids [P]; ids that begin with all ids of an earlier call continue it."""

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """Sets the reward of a call ("" is the newest one); the rewards sum to the episode's return."""

    def set_episode_reward(self, reward: float) -> None:
        """Sets the reward of the episode, for the calls of `agents.loop_args.reward_scope`."""
        self.set_reward(reward)

    def mask(self, completion_id: str, reason: str) -> None:
        """Excludes the tokens of this call from training."""

    def finish(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        outcome: Outcome = Outcome.OK,
        reason: str = "",
    ) -> EpisodeEnd:
        """Returns the end of the episode, for `run` to return; `reward` is that of the episode."""
        if reward is not None:
            self.set_episode_reward(reward)
        return EpisodeEnd(outcome, reason, metrics or {})


class AgentLoop:
    """Base class of your loops. One object plays one episode."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> LoopResult:
        """Plays `row` to its end. An exception ends this episode only.

        Returns `policy.finish(...)`; or the reward of the episode; or rewards by completion id; or
        None if the reward service alone decides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run()")
