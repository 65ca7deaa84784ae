"""Agent loops: code that plays a row of a data set, turn by turn, with the model at its hand.

Whatever a loop does, the tokens that are trained are those that the engine sampled: `chat` and
`generate` keep them in the episode's ledger, and `finish` makes the trajectory from there. Several
calls may run at once (`asyncio.gather`). A worker that dies is followed by another one that runs the
loop again from the start: calls whose answer is known are answered from the journal, so a loop
should depend on nothing but its row and the answers it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import FinishReason, SamplingParams
from tailrace_protos.tool import ToolResult
from tailrace_protos.trajectory import Trajectory

if TYPE_CHECKING:  # rewards and tools import this package where no tokenizer is installed
    from tailrace.chat import Renderer


class EpisodeOverError(Exception):
    """Nothing is left of what the episode may use; let through by its loop, it is a policy failure.

    Attributes: `limit` (the configuration key), `reason`.
    """

    def __init__(self, limit: str, reason: str) -> None:
        super().__init__(f"{limit}: {reason}")
        self.limit = limit
        self.reason = reason


class LoopLimits(NamedTuple):
    """What one episode may use."""

    max_episode_tokens: int  # of one conversation, inserted and sampled together
    max_new_tokens: int  # sampled, over all calls
    max_tokens_per_step: int  # sampled, in one call; 0: what is left of the others
    max_turns: int  # model calls
    wall_clock_s: float
    max_tool_s: float  # time with a tool at work
    tool_timeout_s: float  # one tool call
    max_tool_output_chars: int  # of one tool result; 0: no bound


class Remaining(NamedTuple):
    """What is left of the limits."""

    turns: int
    new_tokens: int
    wall_clock_s: float
    tool_s: float


class ChatReply(NamedTuple):
    """What the model said. `malformed`: what is wrong with a tool call that could not be read."""

    message: ChatMessage
    finish_reason: FinishReason
    malformed: str
    completion_id: str
    num_tokens: int


class LoopTools(Protocol):
    """The tools of an episode: those that its row names."""

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """What the model is told of them."""

    async def call(self, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Run one call; errors that a model can read come as a result, others end the episode."""


class EpisodePolicy(Protocol):
    """The model, the tools and the books of one episode."""

    __slots__ = ()

    tools: LoopTools
    """The tools that the row names."""

    limits: LoopLimits
    """What the episode may use in all."""

    @property
    def episode_id(self) -> str:
        """`<group>.<member>`."""

    @property
    def renderer(self) -> Renderer:
        """Text to token ids and back."""

    @property
    def remaining(self) -> Remaining:
        """What is left of the limits now."""

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> ChatMessage:
        """The model's answer to a conversation; raises `EpisodeOverError` if nothing is left."""
        return (await self.complete(messages, tools)).message

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """As `chat`, with everything that is known of the answer."""

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """The model's continuation of token ids [P]; it continues an earlier call if these ids begin
        with all of that call's."""

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """What a call was worth ("" is the newest one); rewards add up to the episode's return."""

    def mask(self, completion_id: str, reason: str) -> None:
        """Never train the tokens of this call."""

    def finish(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        outcome: Outcome = Outcome.OK,
        reason: str = "",
    ) -> Trajectory:
        """The episode as it stands. `reward` is that of the newest call."""
        if reward is not None:
            self.set_reward(reward)
        return self.conclude(metrics or {}, outcome, reason)

    def conclude(self, metrics: Mapping[str, float], outcome: Outcome, reason: str) -> Trajectory:
        """The episode as it stands, with its rewards set; loops call `finish`."""


class AgentLoop:
    """Derive from this. One object plays one episode."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> Trajectory:
        """Play `row`; end with `return policy.finish(...)`. What it raises ends this episode only."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")
