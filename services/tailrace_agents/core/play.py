"""One episode from reset to end, by any policy: turn by turn, journaled, resumable, bounded.

Invariants: a turn is in the journal before the next one is sampled; recorded turns are never sampled
again; whatever the environment raises ends this episode only, as a typed outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer
from tailrace.foreign import ForeignCodeError
from tailrace.sdk.env import Env
from tailrace.sdk.policy import GenerationFailedError, Policy, TurnRequest
from tailrace_agents.core.environments import EnvHandle, StepResult
from tailrace_agents.core.episode import (
    EpisodeHandedBackError,
    EpisodeLimits,
    EpisodeResult,
    SamplingPlan,
)
from tailrace_agents.core.tokens import EpisodeTokens, observation_hash
from tailrace_agents.ports import EpisodeJournal, NoJournal, Observer
from tailrace_protos.base import as_float32, as_int32, pack_float32, pack_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import OVER_BUDGET, Outcome, TurnRecord
from tailrace_protos.generation import FinishReason


class _ReplayMismatchError(Exception):
    """The environment answered recorded replies in another way than it did before."""


async def play_episode(
    env: Env | EnvHandle,
    renderer: Renderer,
    policy: Policy,
    limits: EpisodeLimits,
    sampling: SamplingPlan,
    *,
    seed: int,
    episode_id: str = "episode",
    journal: EpisodeJournal | None = None,
    threads: Executor | None = None,
    observer: Observer | None = None,
    is_draining: Callable[[], bool] = lambda: False,
    make_tokens: Callable[[], EpisodeTokens] = EpisodeTokens,
) -> EpisodeResult:
    """Play the episode that `seed` fixes to its end; `make_tokens` decides what the policy sees.

    Raises `EpisodeHandedBackError` between two turns once `is_draining`, and `EpisodeTakenError` when
    the journal says that the episode is no longer ours; all other endings are outcomes of the result.
    """
    handle = env if isinstance(env, EnvHandle) else EnvHandle(env, threads)
    episode = _Episode(
        handle, renderer, policy, limits, sampling, seed, episode_id, observer, is_draining, make_tokens
    )
    return await episode.play(journal or NoJournal())


@dataclass(slots=True)
class _Episode:
    """The state of one episode in progress."""

    handle: EnvHandle
    renderer: Renderer
    policy: Policy
    limits: EpisodeLimits
    sampling: SamplingPlan
    seed: int
    episode_id: str
    observer: Observer | None
    is_draining: Callable[[], bool]
    make_tokens: Callable[[], EpisodeTokens]
    tokens: EpisodeTokens = field(init=False)
    observed: int = 0  # hash of the newest observation
    opening: str = ""  # what a window that begins later opens with
    result: EpisodeResult = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.make_tokens()
        self.result = EpisodeResult(tokens=self.tokens)

    async def play(self, journal: EpisodeJournal) -> EpisodeResult:
        """Play within the wall clock; failures become outcomes."""
        deadline = asyncio.timeout(self.limits.wall_clock_s)
        try:
            async with deadline:
                await self._play_resumed(journal)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._end(Outcome.TIMEOUT, f"the deadline passed in turn {self.tokens.num_turns}")
        except (ForeignCodeError, GenerationFailedError) as error:
            self._end(Outcome.INFRA_FAILURE, f"turn {self.tokens.num_turns}: {error}")
        return self.result

    async def _play_resumed(self, journal: EpisodeJournal) -> None:
        try:
            recorded = [one for one in await journal.load() if isinstance(one, TurnRecord)]
            await self._play_turns(journal, recorded)
        except _ReplayMismatchError:
            await journal.clear()
            self.tokens = self.make_tokens()
            self.result = EpisodeResult(tokens=self.tokens, num_restarts=1)
            await self._play_turns(journal, ())

    async def _play_turns(self, journal: EpisodeJournal, recorded: Sequence[TurnRecord]) -> None:
        observation = await self._reset()
        inserted = self._insert(observation)
        while True:
            turn = self.tokens.num_turns
            if turn < len(recorded):
                step = await self._replay(recorded[turn], inserted)
            else:
                if not self._may_sample():
                    return
                step, record = await self._sample(turn, inserted)
                await journal.append(record)
            if step.terminated or step.truncated:
                self.result.metrics.update(step.numbers)
                return
            inserted = self._insert(step.observation)

    async def _reset(self) -> str:
        observation, self.opening = await self.handle.reset(self.seed)
        if self.observer is not None:
            self.observer.on_reset(observation)
        return observation

    def _insert(self, observation: str) -> NDArray[np.int32]:
        """Append the environment's words, rendered, to the tokens and the messages."""
        tokens = self.tokens
        self.observed = observation_hash(str(self.seed), observation)
        first = not len(tokens)
        ids = self.renderer.observation_ids(
            observation, first, first or self.renderer.is_closed(tokens.last_id)
        )
        tokens.insert(ids)
        if tokens.shows_windows:
            text = self.opening + observation
            tokens.open_with(ids if first else self.renderer.observation_ids(text, True, True))
        self.result.messages.append(ChatMessage("user", observation))
        return ids

    def _may_sample(self) -> bool:
        """Whether a turn is left to play: budget for it, and a worker that goes on."""
        if self.is_draining():
            raise EpisodeHandedBackError
        tokens = self.tokens
        if self.limits.turn_budget(tokens) > 0:
            return True
        if tokens.num_turns == 0:
            reason = f"the first observation has {len(tokens)} tokens, max_episode_tokens is smaller"
            self._end(Outcome.INFRA_FAILURE, reason)
        else:
            reason = f"over budget after {tokens.num_sampled} sampled tokens ({len(tokens)} in all)"
            self._end(Outcome.POLICY_FAILURE, reason)
            self.result.metrics.setdefault("success", 0.0)
            self.result.metrics[OVER_BUDGET] = 1.0
        return False

    async def _sample(self, turn: int, inserted: NDArray[np.int32]) -> tuple[StepResult, TurnRecord]:
        """Let the policy answer and the environment take the answer."""
        tokens = self.tokens
        generation = await self.policy.generate(
            TurnRequest(
                tokens.prompt(),
                self.limits.turn_budget(tokens),
                self.sampling.for_turn(turn),
                self.episode_id,
                turn,
            )
        )
        tokens.sample(generation.token_ids, generation.inference_logprobs, generation.spans)
        reply = self.renderer.decode(generation.token_ids)
        step = await self._step(reply)
        record = TurnRecord(
            turn=turn,
            observation_ids=pack_int32(inserted),
            token_ids=pack_int32(generation.token_ids),
            inference_logprobs=pack_float32(generation.inference_logprobs),
            spans=generation.spans,
            finish_reason=generation.finish_reason or FinishReason.ABORT,
            reply=reply,
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
        )
        return step, record

    async def _replay(self, record: TurnRecord, inserted: NDArray[np.int32]) -> StepResult:
        """Take a turn from the journal; the environment must behave as it did when it was recorded."""
        if inserted.tobytes() != bytes(record.observation_ids):
            raise _ReplayMismatchError
        self.tokens.sample(
            as_int32(record.token_ids), as_float32(record.inference_logprobs), record.spans
        )
        step = await self._step(record.reply)
        if (step.reward, step.terminated, step.truncated) != (
            record.reward,
            record.terminated,
            record.truncated,
        ):
            raise _ReplayMismatchError
        self.result.num_replayed_turns += 1
        return step

    async def _step(self, reply: str) -> StepResult:
        result = self.result
        result.messages.append(ChatMessage("assistant", reply))
        step = await self.handle.step(reply)
        self.tokens.finish_turn(step.reward, self.observed)
        if "invalid_action" in step.numbers:
            invalid = step.numbers.pop("invalid_action")
            result.metrics["num_invalid_actions"] = (
                result.metrics.get("num_invalid_actions", 0.0) + invalid
            )
        if self.observer is not None:
            self.observer.on_turn(
                reply, step.observation, step.reward, step.terminated or step.truncated
            )
        return step

    def _end(self, outcome: Outcome, reason: str) -> None:
        self.result.outcome = outcome
        self.result.reason = reason
