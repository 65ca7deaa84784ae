"""A queued episode: play, score, settle. Only a settled episode is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tailrace.clock import Clock
from tailrace.log import get_logger
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.runtime import Delivery, HandBack
from tailrace.store import Journal, TrajectoryBuffer
from tailrace.tracing import span
from tailrace_agents import metrics
from tailrace_agents.adapters.journal import StoredJournal
from tailrace_agents.adapters.scoring import RewardClient
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult
from tailrace_agents.core.lengths import LengthEstimate
from tailrace_agents.core.players import EpisodePlayer, is_baseline
from tailrace_agents.core.settlement import apply_score, build_trajectory, score_item
from tailrace_agents.ports import EpisodeTakenError
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.generation import CallError, CallErrorCode
from tailrace_protos.reward import Score
from tailrace_protos.subjects import PHASES

log = get_logger(__name__)

_MIN_SCORING_S = 5.0


@dataclass(frozen=True)
class Deck:
    """What every episode of this worker is played with."""

    players: Mapping[str, EpisodePlayer]  # by tag
    policy: ContinuingPolicy
    rewards: RewardClient
    buffer: TrajectoryBuffer
    make_journal: Callable[[], Journal]
    clock: Clock
    stages: Stages
    lengths: LengthEstimate
    greedy_baseline: bool = False


class EpisodeHandler:
    """Handles `EpisodeTask`s; thousands at once."""

    def __init__(self, deck: Deck) -> None:
        self._deck = deck
        self._seconds = {phase: metrics.EPISODE_SECONDS.labels(phase) for phase in PHASES}

    async def handle(self, task: EpisodeTask, delivery: Delivery) -> None:
        """Play one episode and settle it, or raise `HandBack` when this worker drains."""
        clock = self._deck.clock
        started_unix_s = clock.unix_s()
        with span("episode", episode_id=task.episode_id):
            try:
                result = await self._play(task, _may_have_records(task, delivery))
            except EpisodeHandedBackError as order:
                metrics.EPISODES_ABANDONED.labels("drain").inc()
                raise HandBack from order
            except EpisodeTakenError as taken:
                metrics.EPISODES_ABANDONED.labels(taken.why).inc()
                return
            await self._settle(task, result, started_unix_s)
        self._seconds[task.phase].observe(clock.unix_s() - started_unix_s)

    async def _play(self, task: EpisodeTask, may_have_records: bool) -> EpisodeResult:
        deck, tag = self._deck, task.task.env_name
        player = deck.players.get(tag)
        if player is None:
            reason = f"unknown tag {tag!r}: add it to agents.custom_envs or agents.datasets"
            return EpisodeResult(Outcome.INFRA_FAILURE, reason)
        journal = StoredJournal(deck.make_journal(), task.episode_id, deck.stages, may_have_records)
        deck.policy.begin(task.episode_id, deck.lengths.predict(tag))
        try:
            result = await player.play(task, journal)
        finally:
            deck.policy.end(task.episode_id)
        if result.outcome.is_valid:
            deck.lengths.observe(tag, len(result.tokens))
        return result

    async def _settle(self, task: EpisodeTask, result: EpisodeResult, started_unix_s: float) -> None:
        deck = self._deck
        reward = (
            apply_score(result, await self._score(task, result)) if result.outcome.is_valid else 0.0
        )
        rows, num_nonfinite = result.tokens.rows(reward)
        trajectory = build_trajectory(task, result, rows, reward, started_unix_s, deck.clock.unix_s())
        if is_baseline(task, deck.greedy_baseline):
            trajectory = msgspec.structs.replace(trajectory, is_greedy=True)
        deck.stages.num_settling += 1
        try:
            put = await deck.buffer.put_trajectory(trajectory)
        finally:
            deck.stages.num_settling -= 1
        metrics.SETTLEMENTS.labels(put.value).inc()
        _count(task, result, num_nonfinite)

    async def _score(self, task: EpisodeTask, result: EpisodeResult) -> Score:
        deck = self._deck
        left_s = max(task.deadline_unix_s - deck.clock.unix_s(), _MIN_SCORING_S)
        deck.stages.num_in_reward += 1
        try:
            async with asyncio.timeout(left_s):
                return await deck.rewards.score(score_item(task, result))
        except TimeoutError:
            reason = f"no score within {left_s:.0f} s: is the reward service running?"
            return Score(task.episode_id, error=CallError(CallErrorCode.INTERNAL, reason))
        finally:
            deck.stages.num_in_reward -= 1


def _may_have_records(task: EpisodeTask, delivery: Delivery) -> bool:
    """Whether somebody may have played this episode before; a copy made on a drain has another id."""
    is_first_copy = delivery.message_id.endswith(task.message_id)
    return delivery.num_delivered > 1 or task.attempt > 0 or not is_first_copy


def _count(task: EpisodeTask, result: EpisodeResult, num_nonfinite: int) -> None:
    metrics.EPISODES_ENDED.labels(task.phase, result.outcome.value).inc()
    metrics.TURNS.inc(result.tokens.num_turns)
    metrics.SAMPLED_TOKENS.inc(result.tokens.num_sampled)
    if result.num_replayed_turns:
        metrics.REPLAYED_TURNS.inc(result.num_replayed_turns)
    if result.num_restarts:
        metrics.REPLAY_MISMATCHES.inc(result.num_restarts)
    for name in metrics.OF_EPISODES.keys() & result.metrics.keys():
        metrics.OF_EPISODES[name].inc(result.metrics[name])
    if num_nonfinite:
        metrics.NONFINITE_LOGPROBS.inc(num_nonfinite)
    if result.outcome is Outcome.INFRA_FAILURE:
        log.warning("episode failed", episode_id=task.episode_id, reason=result.reason)
