"""A model behind an OpenAI endpoint as an agent loop sees it: messages only, no tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace.sdk.agent_loop import (
    ChatReply,
    EpisodeOverError,
    EpisodePolicy,
    LoopLimits,
    Remaining,
)
from tailrace_agents.core.loops.tools import BoundTools
from tailrace_agents.core.tokens import CheckedRows
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import Endpoint, EndpointError, on_wire, read_message, schema_on_wire
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.generation import FinishReason, SamplingParams
from tailrace_protos.trajectory import Trajectory


@dataclass
class EndpointBooks:
    """`EpisodeBooks` without tokens: what the endpoint says that it counted."""

    rewards: list[float] = field(default_factory=list)
    num_sampled: int = 0
    num_prompt: int = 0

    @property
    def num_turns(self) -> int:
        """Model calls."""
        return len(self.rewards)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """What each call was worth."""
        return tuple(self.rewards)

    def __len__(self) -> int:
        return self.num_prompt + self.num_sampled

    def add(self, num_prompt: int, num_sampled: int) -> None:
        """Note a call."""
        self.num_prompt = num_prompt
        self.num_sampled += num_sampled
        self.rewards.append(0.0)

    def rows(self, reward: float) -> CheckedRows:
        """None: nobody knows the tokens."""
        return CheckedRows((), 0)


@dataclass(slots=True)
class EndpointPolicy(EpisodePolicy):
    """The policy behind an endpoint."""

    endpoint: Endpoint
    task: EpisodeTask
    limits: LoopLimits
    sampling: SamplingParams
    tools: BoundTools
    screen: Screen
    books: EndpointBooks = field(default_factory=EndpointBooks)
    conversation: list[ChatMessage] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def episode_id(self) -> str:
        """See `EpisodePolicy`."""
        return self.task.episode_id

    @property
    def renderer(self) -> NoReturn:
        """There is none."""
        raise _no_tokens()

    @property
    def remaining(self) -> Remaining:
        """See `EpisodePolicy`."""
        limits, books = self.limits, self.books
        turns, tokens = limits.max_turns - books.num_turns, limits.max_new_tokens - books.num_sampled
        return Remaining(turns, tokens, limits.wall_clock_s, limits.max_tool_s - self.tools.spent_s)

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """See `EpisodePolicy`."""
        left = self.remaining
        if left.turns <= 0 or left.new_tokens <= 0:
            raise EpisodeOverError("max_turns" if left.turns <= 0 else "max_new_tokens", "used up")
        self._show(messages)
        bounds = [bound for bound in (max_new_tokens, self.limits.max_tokens_per_step) if bound]
        params = sampling or self.sampling
        body = {
            "messages": [on_wire(message) for message in messages],
            "max_tokens": min([left.new_tokens, *bounds]),
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if tools:
            body["tools"] = [{"type": "function", "function": schema_on_wire(tool)} for tool in tools]
        reply = await self._ask(body)
        self.conversation = [*messages, reply.message]
        return reply

    def _show(self, messages: Sequence[ChatMessage]) -> None:
        """On the screen: what is new."""
        known = len(self.conversation)
        if list(messages[:known]) == self.conversation:
            self.screen.messages(messages[known:])
            return
        self.screen.messages(messages)
        self.screen.line("another conversation, or the messages before were changed")

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> NoReturn:
        """An endpoint takes text only."""
        raise _no_tokens()

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """See `EpisodePolicy`."""
        self.books.rewards[int(completion_id) if completion_id else -1] = reward

    def mask(self, completion_id: str, reason: str) -> None:
        """Nothing is trained here anyway."""

    def conclude(self, metrics: Mapping[str, float], outcome: Outcome, reason: str) -> Trajectory:
        """See `EpisodePolicy`; there are no rows."""
        task, now_s = self.task, 0.0
        return Trajectory(
            task.episode_id, task.group_id, task.member, task.attempt, task.phase, task.task,
            outcome, reason, sum(self.books.rewards), {**self.tools.counts, **metrics},
            now_s, now_s,
        )  # fmt: skip

    async def _ask(self, body: Mapping[str, Any]) -> ChatReply:
        answer = await self.endpoint.ask(body)
        try:
            choice = answer["choices"][0]
            said = choice["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self.endpoint.url} sent no choices: {error!r}") from error
        usage = answer.get("usage") or {}
        num_prompt, num_sampled = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        self.books.add(num_prompt, num_sampled)
        message = read_message(said)
        is_cut = choice.get("finish_reason") == "length"
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        self.screen.reply(message, f"{num_prompt} tokens in, {num_sampled} out, {reason.value}")
        return ChatReply(message, reason, "", str(next(self._ids)), num_sampled)


def _no_tokens() -> ConfigError:
    return ConfigError("this agent loop works with token ids: play it without --endpoint")
