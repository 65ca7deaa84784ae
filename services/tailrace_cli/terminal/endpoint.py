"""A model behind an OpenAI endpoint, for the episode machine: messages only, no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace.sdk.agent_loop import ChatReply, EpisodePolicy, Remaining
from tailrace_agents.core.environments import StepResult
from tailrace_agents.core.journal import EpisodeRecords
from tailrace_agents.core.machine import Episode
from tailrace_agents.core.model import EnvPolicy, EnvView, LoopPlan
from tailrace_agents.core.tools import NO_TOOLS, BoundTools, NoTools
from tailrace_agents.ports import LoopObserver
from tailrace_cli.terminal.screen import Screen
from tailrace_cli.terminal.wire import (
    Endpoint,
    EndpointFailedError,
    on_wire,
    read_message,
    schema_on_wire,
)
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason, SamplingParams
from tailrace_protos.trajectory import TokenRow


class TextTranscript:
    """`Transcript` without tokens: it has the endpoint's token counts and no rows."""

    num_nonfinite = 0
    faults = ()

    def __init__(self) -> None:
        self.rewards: list[float] = []  # one per call
        self.conversation: list[ChatMessage] = []
        self.num_sampled = 0
        self._num_prompt = 0

    @property
    def num_turns(self) -> int:
        """See `Transcript`."""
        return len(self.rewards)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """See `Transcript`."""
        return tuple(self.rewards)

    def __len__(self) -> int:
        return self._num_prompt + self.num_sampled

    def add(self, conversation: Sequence[ChatMessage], num_prompt: int, num_sampled: int) -> None:
        """Adds a call; `conversation` ends with its reply."""
        self.conversation = list(conversation)
        self._num_prompt = num_prompt
        self.num_sampled += num_sampled
        self.rewards.append(0.0)

    def messages(self) -> Sequence[ChatMessage]:
        """See `Transcript`."""
        return self.conversation

    def counts(self) -> Mapping[str, float]:
        """See `Transcript`."""
        return {}

    def rows(self, reward: float) -> tuple[TokenRow, ...]:
        """Returns no rows: the tokens are not known."""
        return ()


class EndpointModel(NamedTuple):
    """`EpisodeModel` of an endpoint."""

    endpoint: Endpoint
    screen: Screen
    stop_token_ids: tuple[int, ...] = ()

    def require_plain_turns(self) -> None:
        """An endpoint applies its own chat template."""

    def loop_policy(
        self,
        episode: Episode,
        plan: LoopPlan,
        records: EpisodeRecords,
        tools: BoundTools,
        observer: LoopObserver | None,
    ) -> EpisodePolicy:
        """See `EpisodeModel`."""
        return EndpointPolicy(self.endpoint, self.screen, episode, tools)

    def env_policy(self, episode: Episode, view: EnvView, records: EpisodeRecords) -> EnvPolicy:
        """See `EpisodeModel`."""
        return EndpointPolicy(self.endpoint, self.screen, episode, NO_TOOLS)


class EndpointPolicy(EnvPolicy):
    """Policy behind an endpoint, of a loop or of an environment."""

    def __init__(
        self, endpoint: Endpoint, screen: Screen, episode: Episode, tools: BoundTools | NoTools
    ) -> None:
        self._endpoint = endpoint
        self._screen = screen
        self._episode = episode
        self._transcript = episode.transcript = TextTranscript()
        self.tools = tools
        self.limits = episode.limits

    @property
    def episode_id(self) -> str:
        """See `EpisodePolicy`."""
        return self._episode.task.episode_id

    @property
    def renderer(self) -> NoReturn:
        """Raises `ConfigError`: there is no renderer."""
        raise _no_tokens()

    @property
    def remaining(self) -> Remaining:
        """See `EpisodePolicy`."""
        return self._episode.remaining(self.tools.spent_s)

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """See `EpisodePolicy`."""
        self._screen.continued(self._transcript.conversation, messages)
        reply, num_prompt = await self._ask(messages, tools, max_new_tokens, sampling)
        counts = f"{num_prompt} tokens in, {reply.num_tokens} out, {reply.finish_reason.value}"
        self._screen.reply(reply.message, counts)
        return reply

    async def answer(self, observation: str, opening: str) -> str:
        """See `EnvPolicy`; the model sees all turns."""
        messages = [*self._transcript.conversation, ChatMessage("user", observation)]
        reply, _ = await self._ask(messages, (), None, None)
        return reply.message.content

    async def take_step(self, step: StepResult) -> None:
        """See `EnvPolicy`."""
        self.set_reward(step.reward)

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> NoReturn:
        """Raises `ConfigError`: an endpoint takes text only."""
        raise _no_tokens()

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """See `EpisodePolicy`."""
        self._transcript.rewards[int(completion_id) if completion_id else -1] = reward

    def mask(self, completion_id: str, reason: str) -> None:
        """Does nothing: no tokens are trained."""

    async def _ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        max_new_tokens: int | None,
        sampling: SamplingParams | None,
    ) -> tuple[ChatReply, int]:
        """Returns the reply and the number of prompt tokens."""
        with self._episode.latch:
            call = self._episode.next_call()
            params = sampling or self._episode.sampling.params
            body: dict[str, Any] = {
                "messages": [on_wire(message) for message in messages],
                "max_tokens": self._episode.budget(0, call, max_new_tokens),
                "temperature": params.temperature,
                "top_p": params.top_p,
            }
            if tools:
                functions = map(schema_on_wire, tools)
                body["tools"] = [{"type": "function", "function": one} for one in functions]
            choice, num_prompt, num_sampled = await self._choice(body)
        message = read_message(choice["message"])
        is_cut = choice.get("finish_reason") == "length"
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        completion_id = str(self._transcript.num_turns)
        self._transcript.add([*messages, message], num_prompt, num_sampled)
        return ChatReply(message, reason, "", completion_id, num_sampled), num_prompt

    async def _choice(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
        answer = await self._endpoint.ask(body)
        try:
            choice = answer["choices"][0]
            choice["message"]
        except (KeyError, IndexError, TypeError) as error:
            reason = f"{self._endpoint.url} sent no choices: {error!r}"
            raise EndpointFailedError(reason) from error
        usage = answer.get("usage") or {}
        return choice, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)


def _no_tokens() -> ConfigError:
    return ConfigError("this agent loop works with token ids: play it without --endpoint")
