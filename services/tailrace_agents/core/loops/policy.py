"""The model as one agent loop sees it: every call goes through ledger, budget and journal.

Invariants: a call is in the journal before the loop sees its answer; a known answer is never sampled
again; no call may sample more than what is left of the episode's budget when it begins (calls at the
same time do not wait for each other, so together they may pass it by their own lengths).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.ledger import Ledger, Prompt
from tailrace.sdk.agent_loop import (
    ChatReply,
    EpisodeOverError,
    EpisodePolicy,
    LoopLimits,
    Remaining,
)
from tailrace.sdk.policy import TurnRequest
from tailrace_agents.core.episode import EpisodeHandedBackError, SamplingPlan
from tailrace_agents.core.loops.books import LedgerBooks
from tailrace_agents.core.loops.fate import Fate
from tailrace_agents.core.loops.journal import LoopJournal
from tailrace_agents.core.loops.observer import LoopObserver
from tailrace_agents.core.loops.tools import BoundTools
from tailrace_agents.core.players import PlayContext
from tailrace_protos.base import as_float32, as_int32, pack_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import LedgerNode
from tailrace_protos.trajectory import Trajectory


@dataclass(slots=True)
class LoopPolicy(EpisodePolicy):
    """The policy of one task."""

    task: EpisodeTask
    context: PlayContext
    limits: LoopLimits
    books: LedgerBooks
    journal: LoopJournal
    tools: BoundTools
    fate: Fate
    observer: LoopObserver | None = None
    num_calls: int = 0
    started_s: float = field(init=False)
    started_unix_s: float = field(init=False)
    sampling: SamplingPlan = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.context.clock.monotonic_s()
        self.started_unix_s = self.context.clock.unix_s()
        self.sampling = self.context.sampling(self.task)

    @property
    def episode_id(self) -> str:
        """See `EpisodePolicy`."""
        return self.task.episode_id

    @property
    def renderer(self) -> Renderer:
        """See `EpisodePolicy`."""
        return self.context.renderer

    @property
    def ledger(self) -> Ledger:
        """The episode's books."""
        return self.books.ledger

    @property
    def remaining(self) -> Remaining:
        """See `EpisodePolicy`."""
        limits = self.limits
        return Remaining(
            turns=limits.max_turns - self.num_calls,
            new_tokens=limits.max_new_tokens - self.ledger.num_sampled,
            wall_clock_s=limits.wall_clock_s - (self.context.clock.monotonic_s() - self.started_s),
            tool_s=limits.max_tool_s - self.tools.spent_s,
        )

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> ChatReply:
        """See `EpisodePolicy`."""
        prompt = self.ledger.prepare(tuple(messages), tuple(tools))
        node = await self._ask(prompt, max_new_tokens, sampling)
        return ChatReply(
            node.reply,
            node.finish_reason,
            self._malformed(node, sampling) if node.num_malformed else "",
            node.completion_id,
            len(node.token_ids) // 4,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """See `EpisodePolicy`."""
        prompt = self.ledger.prepare_tokens(np.asarray(prompt_ids, dtype=np.int32))
        node = await self._ask(prompt, max_new_tokens, sampling)
        return Generation(
            as_int32(node.token_ids),
            as_float32(node.inference_logprobs),
            node.spans,
            node.finish_reason,
            None,
            0,
        )

    def set_reward(self, reward: float, completion_id: str = "") -> None:
        """See `EpisodePolicy`."""
        self.ledger.set_reward(reward, completion_id)

    def mask(self, completion_id: str, reason: str) -> None:
        """See `EpisodePolicy`."""
        self.ledger.mask(completion_id, reason)

    def conclude(self, metrics: Mapping[str, float], outcome: Outcome, reason: str) -> Trajectory:
        """See `EpisodePolicy`."""
        task = self.task
        value = sum(self.books.turn_rewards)
        return Trajectory(
            episode_id=task.episode_id,
            group_id=task.group_id,
            member=task.member,
            attempt=task.attempt,
            phase=task.phase,
            task=task.task,
            outcome=outcome,
            reason=reason,
            reward=value,
            metrics={**self.ledger.counts(), **self.tools.counts, **metrics},
            started_unix_s=self.started_unix_s,
            finished_unix_s=self.context.clock.unix_s(),
            rows=self.books.rows(value).rows,
        )

    async def _ask(
        self, prompt: Prompt, max_new_tokens: int | None, sampling: SamplingParams | None
    ) -> LedgerNode:
        """The answer to a prompt, from the journal or from the model."""
        with self.fate:
            turn, self.num_calls = self.num_calls, self.num_calls + 1
            prompt_ids = pack_int32(prompt.prompt_ids)
            node = self.journal.known_call(prompt_ids)
            was_known = node is not None
            if node is not None:
                self.ledger.add(node)
            else:
                budget = self._budget(len(prompt.prompt_ids), turn, max_new_tokens)
                node = await self._sample(prompt, turn, budget, sampling)
                await self.journal.keep_call(prompt_ids, node)
        if self.observer is not None:
            self.observer.on_call(prompt, node, was_known)
        return node

    async def _sample(
        self, prompt: Prompt, turn: int, budget: int, sampling: SamplingParams | None
    ) -> LedgerNode:
        if self.context.is_draining():
            raise EpisodeHandedBackError
        params = self.sampling.for_turn(turn) if sampling is None else self._own(sampling)
        generation = await self.context.policy.generate(
            TurnRequest(pack_int32(prompt.prompt_ids), budget, params, self.episode_id, turn)
        )
        completion_id = f"call-{uuid.uuid4().hex}"
        parsed = self.renderer.parse_reply(
            generation.token_ids, prompt.tools, stop=params.stop, id_seed=completion_id
        )
        return self.ledger.record(prompt, generation, parsed, completion_id)

    def _malformed(self, node: LedgerNode, sampling: SamplingParams | None) -> str:
        """What is wrong with the calls of a reply: the ledger keeps their number only."""
        stop = (self.sampling.params if sampling is None else sampling).stop
        return self.renderer.parse_reply(as_int32(node.token_ids), node.tools, stop=stop).malformed

    def _own(self, sampling: SamplingParams) -> SamplingParams:
        """A loop's own parameters; a reply always ends where the model ends it."""
        if sampling.stop_token_ids:
            return sampling
        return msgspec.structs.replace(sampling, stop_token_ids=self.renderer.stop_token_ids)

    def _budget(self, num_prompt: int, turn: int, max_new_tokens: int | None) -> int:
        """How many tokens this call may sample; raises `EpisodeOverError`."""
        limits, num_sampled = self.limits, self.ledger.num_sampled
        if turn >= limits.max_turns:
            raise EpisodeOverError("max_turns", f"{turn} model calls were made")
        if num_sampled >= limits.max_new_tokens:
            raise EpisodeOverError("max_new_tokens", f"{num_sampled} tokens were sampled")
        if num_prompt >= limits.max_episode_tokens:
            reason = f"the next prompt has {num_prompt} tokens"
            raise EpisodeOverError("max_episode_tokens", reason)
        bounds = [limits.max_new_tokens - num_sampled, limits.max_episode_tokens - num_prompt]
        bounds += [bound for bound in (limits.max_tokens_per_step, max_new_tokens) if bound]
        return min(bounds)
