"""One episode from reset to end, by any policy: turn by turn, journaled, resumable, bounded.

Invariants: a turn is in the journal before the next one is sampled; recorded turns are never sampled
again; whatever the environment raises ends this episode only, as a typed outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer
from tailrace.sdk.env import Env
from tailrace.sdk.foreign import ForeignCodeError
from tailrace.sdk.policy import GenerationFailedError, Policy
from tailrace_agents.core.environments import EnvHandle, StepResult
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeLimits, EpisodeResult, SamplingPlan
from tailrace_agents.ports import EpisodeJournal, NoJournal, Observer
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.episode import Outcome, TurnRecord
from tailrace_protos.generation import FinishReason
from tailrace_protos.reward import ChatMessage


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
) -> EpisodeResult:
    """Play the episode that `seed` fixes to its end.

    Raises `EpisodeHandedBackError` between two turns once `is_draining`, and `EpisodeTakenError` when
    the journal says that the episode is no longer ours; all other endings are outcomes of the result.
    """
    handle = env if isinstance(env, EnvHandle) else EnvHandle(env, threads)
    episode = _Episode(handle, renderer, policy, limits, sampling, seed, episode_id, observer, is_draining)
    return await episode.play(journal or NoJournal())


class _Episode:
    """The state of one episode in progress."""

    __slots__ = (
        "_episode_id",
        "_handle",
        "_is_draining",
        "_limits",
        "_num_invalid_actions",
        "_observer",
        "_policy",
        "_renderer",
        "_result",
        "_sampling",
        "_seed",
    )

    def __init__(
        self,
        handle: EnvHandle,
        renderer: Renderer,
        policy: Policy,
        limits: EpisodeLimits,
        sampling: SamplingPlan,
        seed: int,
        episode_id: str,
        observer: Observer | None,
        is_draining: Callable[[], bool],
    ) -> None:
        self._handle = handle
        self._renderer = renderer
        self._policy = policy
        self._limits = limits
        self._sampling = sampling
        self._seed = seed
        self._episode_id = episode_id
        self._observer = observer
        self._is_draining = is_draining
        self._result = EpisodeResult()

    async def play(self, journal: EpisodeJournal) -> EpisodeResult:
        """Play within the wall clock; failures become outcomes."""
        deadline = asyncio.timeout(self._limits.wall_clock_s)
        try:
            async with deadline:
                await self._play_resumed(journal)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._end(Outcome.TIMEOUT, f"the deadline passed in turn {self._result.tokens.num_turns}")
        except (ForeignCodeError, GenerationFailedError) as error:
            self._end(Outcome.INFRA_FAILURE, f"turn {self._result.tokens.num_turns}: {error}")
        return self._result

    async def _play_resumed(self, journal: EpisodeJournal) -> None:
        try:
            await self._play_turns(journal, await journal.load())
        except _ReplayMismatchError:
            await journal.clear()
            self._result = EpisodeResult(num_restarts=1)
            await self._play_turns(journal, ())

    async def _play_turns(self, journal: EpisodeJournal, recorded: Sequence[TurnRecord]) -> None:
        tokens = self._result.tokens
        observation = await self._reset()
        inserted = self._insert(observation)
        while True:
            turn = tokens.num_turns
            if turn < len(recorded):
                step = await self._replay(recorded[turn], inserted)
            else:
                if not self._may_sample():
                    return
                step, record = await self._sample(turn, inserted)
                await journal.append(record)
            if step.terminated or step.truncated:
                self._result.metrics.update(step.numbers)
                return
            inserted = self._insert(step.observation)

    async def _reset(self) -> str:
        observation = await self._handle.reset(self._seed)
        if self._observer is not None:
            self._observer.on_reset(observation)
        return observation

    def _insert(self, observation: str) -> NDArray[np.int32]:
        """Append the environment's words, rendered, to the tokens and the messages."""
        tokens = self._result.tokens
        first = not len(tokens)
        ids = self._renderer.observation_ids(observation, first, first or self._renderer.is_closed(tokens.last_id))
        tokens.insert(ids)
        self._result.messages.append(ChatMessage("user", observation))
        return ids

    def _may_sample(self) -> bool:
        """Whether a turn is left to play: budget for it, and a worker that goes on."""
        if self._is_draining():
            raise EpisodeHandedBackError
        tokens = self._result.tokens
        if self._limits.turn_budget(tokens) > 0:
            return True
        if tokens.num_turns == 0:
            reason = f"the first observation has {len(tokens)} tokens, max_episode_tokens is smaller"
            self._end(Outcome.INFRA_FAILURE, reason)
        else:
            reason = f"over budget after {tokens.num_sampled} sampled tokens ({len(tokens)} in all)"
            self._end(Outcome.POLICY_FAILURE, reason)
            self._result.metrics.setdefault("success", 0.0)
        return False

    async def _sample(self, turn: int, inserted: NDArray[np.int32]) -> tuple[StepResult, TurnRecord]:
        """Let the policy answer and the environment take the answer."""
        tokens = self._result.tokens
        generation = await self._policy.generate(
            tokens.prompt(),
            self._limits.turn_budget(tokens),
            self._sampling.for_turn(turn),
            episode_id=self._episode_id,
            turn=turn,
        )
        tokens.sample(generation.token_ids, generation.inference_logprobs, generation.version_spans)
        reply = self._renderer.decode(generation.token_ids)
        step = await self._step(reply)
        record = TurnRecord(
            turn=turn,
            observation_ids=inserted.data.cast("B"),
            token_ids=generation.token_ids.data.cast("B"),
            inference_logprobs=generation.inference_logprobs.data.cast("B"),
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
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
        self._result.tokens.sample(
            as_int32(record.token_ids), as_float32(record.inference_logprobs), record.version_spans
        )
        step = await self._step(record.reply)
        if (step.reward, step.terminated, step.truncated) != (record.reward, record.terminated, record.truncated):
            raise _ReplayMismatchError
        self._result.num_replayed_turns += 1
        return step

    async def _step(self, reply: str) -> StepResult:
        result = self._result
        result.messages.append(ChatMessage("assistant", reply))
        step = await self._handle.step(reply)
        result.tokens.finish_turn(step.reward)
        if "invalid_action" in step.numbers:
            invalid = step.numbers.pop("invalid_action")
            result.metrics["num_invalid_actions"] = result.metrics.get("num_invalid_actions", 0.0) + invalid
        if self._observer is not None:
            self._observer.on_turn(reply, step.observation, step.reward, step.terminated or step.truncated)
        return step

    def _end(self, outcome: Outcome, reason: str) -> None:
        self._result.outcome = outcome
        self._result.reason = reason
