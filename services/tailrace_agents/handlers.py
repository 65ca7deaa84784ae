"""Handler of queued episodes: play, score, settle. Only a settled episode is acknowledged."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.clock import Clock
from tailrace.log import get_logger
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.runtime import Delivery, HandBack, LeftToAnother
from tailrace.store import AppendResult, Journal, PutResult, TrajectoryBuffer
from tailrace.tracing import Span, episode, span
from tailrace_agents import metrics
from tailrace_agents.adapters.kept_episodes import EpisodeKeeper
from tailrace_agents.adapters.scoring import RewardClient
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult
from tailrace_agents.core.machine import EpisodePlayer, is_baseline
from tailrace_agents.core.settlement import apply_score, build_trajectory, score_item
from tailrace_agents.ports import EpisodeTakenError
from tailrace_protos.control import EpisodesStopped
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.generation import CallError, CallErrorCode
from tailrace_protos.journal import JournalRecord, OldRecordError
from tailrace_protos.reward import Score
from tailrace_protos.subjects import PHASES
from tailrace_protos.trajectory import TokenRow

log = get_logger(__name__)

_MIN_SCORING_S = 5.0


class StoredJournal:
    """`EpisodeJournal` of one attempt at one episode.

    `may_have_records` is False at the first delivery of the first attempt: then Redis is not asked.
    """

    def __init__(
        self, journal: Journal, episode_id: str, stages: Stages, may_have_records: bool
    ) -> None:
        self._journal = journal
        self._episode_id = episode_id
        self._stages = stages
        self.may_have_records = may_have_records

    async def load(self) -> Sequence[JournalRecord]:
        """See `EpisodeJournal`. Records of an older Tailrace are deleted: the episode begins again."""
        if not self.may_have_records:
            return ()
        try:
            return await self._journal.load(self._episode_id)
        except OldRecordError as error:
            log.warning(
                "journal of an older Tailrace: the episode begins again",
                episode_id=self._episode_id,
                record_kind=error.kind,
                reason=error.reason,
            )
            await self.clear()
            return ()

    async def append(self, record: JournalRecord) -> None:
        """See `EpisodeJournal`."""
        self._stages.num_settling += 1
        try:
            result = await self._journal.append(self._episode_id, record)
        finally:
            self._stages.num_settling -= 1
        if result is not AppendResult.APPENDED:
            raise EpisodeTakenError(self._episode_id, result.value)

    async def require_own(self) -> None:
        """See `EpisodeJournal`."""
        if taken := await self._journal.taken_by(self._episode_id):
            raise EpisodeTakenError(self._episode_id, taken.value)

    async def clear(self) -> None:
        """See `EpisodeJournal`."""
        await self._journal.clear(self._episode_id)


@dataclass(frozen=True)
class HandlerParts:
    """Parts that every episode of this worker uses."""

    players: Mapping[str, EpisodePlayer]  # by tag
    policy: ContinuingPolicy
    rewards: RewardClient
    buffer: TrajectoryBuffer
    make_journal: Callable[[str], Journal]  # by the message of the attempt
    clock: Clock
    stages: Stages
    keeper: EpisodeKeeper
    greedy_baseline: bool = False


class EpisodeHandler:
    """Handles `EpisodeTask`s; thousands at once."""

    def __init__(self, parts: HandlerParts) -> None:
        self._parts = parts
        self._warned: set[str] = set()  # tags whose rows without a reward are in the log
        self._played: dict[str, asyncio.Timeout] = {}  # ends the episode when it is rescheduled
        self._seconds = {phase: metrics.EPISODE_SECONDS.labels(phase) for phase in PHASES}

    async def handle(self, task: EpisodeTask, delivery: Delivery) -> None:
        """Play one episode and settle it, or raise `HandBack` when this worker drains.

        Returns without settling if the scheduler stops the episode: it is settled then. Raises
        `LeftToAnother` if its message was redelivered to a worker that plays it now.
        """
        clock = self._parts.clock
        started_unix_s = clock.unix_s()
        # Its message may have waited while the run was stopped. The scheduler ends the group's time.
        deadline_unix_s = max(task.deadline_unix_s, started_unix_s + task.timeout_s)
        task = msgspec.structs.replace(task, deadline_unix_s=deadline_unix_s)
        player = self._parts.players.get(task.task.env_name)
        stopping = asyncio.timeout(None)
        if player is None or player.is_stoppable:
            self._played[task.episode_id] = stopping
        root = episode(task.episode_id)
        with span("play", root, episode_id=task.episode_id, attempt=task.attempt) as played:
            try:
                async with stopping:
                    result = await self._play(task, delivery)
                    await self._settle(task, result, started_unix_s, played)
            except EpisodeHandedBackError as order:
                _abandon(played, "drain")
                raise HandBack from order
            except EpisodeTakenError as taken:
                _abandon(played, taken.why)
                if taken.why == AppendResult.REDELIVERED:
                    raise LeftToAnother from taken
                return
            except TimeoutError:
                if not stopping.expired():
                    raise
                _abandon(played, "stopped")
                return
            finally:
                if self._played.get(task.episode_id) is stopping:
                    del self._played[task.episode_id]
        self._seconds[task.phase].observe(clock.unix_s() - started_unix_s)

    async def on_stopped(self, stopped: EpisodesStopped) -> None:
        """Stop episodes that the scheduler has settled: cancel them, with their turn at the engine."""
        for episode_id in stopped.episode_ids:
            playing = self._played.pop(episode_id, None)
            if playing is not None:
                playing.reschedule(asyncio.get_running_loop().time())

    async def _play(self, task: EpisodeTask, delivery: Delivery) -> EpisodeResult:
        parts, tag = self._parts, task.task.env_name
        may_have_records = _may_have_records(task, delivery)
        player = parts.players.get(tag)
        if player is None:
            reason = f"unknown tag {tag!r}: add it to agents.custom_envs or agents.datasets"
            return EpisodeResult(Outcome.INFRA_FAILURE, reason)
        records = parts.make_journal(f"{delivery.stream_seq}-{delivery.stored_ns}")
        journal = StoredJournal(records, task.episode_id, parts.stages, may_have_records)
        # An episode that was played before may have moved since: its next turn asks.
        lease = None if may_have_records else task.lease
        parts.policy.begin(task.episode_id, lease)
        try:
            return await player.play(task, journal)
        finally:
            parts.policy.end(task.episode_id)

    async def _settle(
        self, task: EpisodeTask, result: EpisodeResult, started_unix_s: float, played: Span
    ) -> None:
        parts, reward = self._parts, 0.0
        if result.outcome.is_valid:
            with span("reward"):
                reward = apply_score(result, await self._score(task, result))
        if played.traceparent:
            played.set(**_traced(task, result, reward))
        rows = result.transcript.rows(reward)
        self._warn_of_unrewarded(task, rows)
        trajectory = build_trajectory(task, result, rows, reward, started_unix_s, parts.clock.unix_s())
        if is_baseline(task, parts.greedy_baseline):
            trajectory = msgspec.structs.replace(trajectory, is_greedy=True)
        parts.stages.num_settling += 1
        try:
            with span("settle"):
                put = await parts.buffer.put_trajectory(trajectory)
        finally:
            parts.stages.num_settling -= 1
        metrics.SETTLEMENTS.labels(put.value).inc()
        _count(task, result)
        if put is PutResult.SETTLED:
            await parts.keeper.keep(trajectory, result)
        await result.after_settlement()

    def _warn_of_unrewarded(self, task: EpisodeTask, rows: Sequence[TokenRow]) -> None:
        """Counts rows of conversations without a reward, and logs the first of each tag."""
        num_rows = sum(not row.has_reward for row in rows)
        if not num_rows:
            return
        metrics.UNREWARDED_ROWS.inc(num_rows)
        tag = task.task.env_name
        if tag not in self._warned:
            self._warned.add(tag)
            log.warning(
                "rows without a reward are not trained",
                tag=tag,
                episode_id=task.episode_id,
                num_rows=num_rows,
                num_rows_of_episode=len(rows),
                remedy="return a number with reward_scope: episode, or a reward for a call of every "
                "conversation",
            )

    async def _score(self, task: EpisodeTask, result: EpisodeResult) -> Score:
        parts = self._parts
        begun_s = parts.clock.monotonic_s()
        left_s = max(result.deadline_unix_s - parts.clock.unix_s(), _MIN_SCORING_S)
        parts.stages.num_in_reward += 1
        try:
            async with asyncio.timeout(left_s):
                return await parts.rewards.score(score_item(task, result))
        except TimeoutError:
            reason = f"no score within {left_s:.0f} s: is the reward service running?"
            return Score(task.episode_id, error=CallError(CallErrorCode.INTERNAL, reason))
        finally:
            parts.stages.num_in_reward -= 1
            reward_s = parts.clock.monotonic_s() - begun_s
            result.stages = msgspec.structs.replace(result.stages, reward_s=reward_s)


def _abandon(played: Span, why: str) -> None:
    metrics.EPISODES_ABANDONED.labels(why).inc()
    played.set(abandoned=why)


def _traced(task: EpisodeTask, result: EpisodeResult, reward: float) -> dict[str, Any]:
    """Attributes of a played episode's span."""
    return {
        "group_id": task.group_id,
        "phase": task.phase,
        "tag": task.task.env_name,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "reward": reward,
        "num_turns": result.transcript.num_turns,
        "num_prompt_tokens": len(result.transcript) - result.transcript.num_sampled,
        "num_sampled_tokens": result.transcript.num_sampled,
        "messages": result.messages,
        **result.metrics,
    }


def _may_have_records(task: EpisodeTask, delivery: Delivery) -> bool:
    """True if this episode may have been played before; a copy made on a drain has another id."""
    is_first_copy = delivery.message_id.endswith(task.message_id)
    return delivery.num_delivered > 1 or task.attempt > 0 or not is_first_copy


def _count(task: EpisodeTask, result: EpisodeResult) -> None:
    metrics.EPISODES_ENDED.labels(task.phase, result.outcome.value).inc()
    metrics.TURNS.inc(result.transcript.num_turns)
    metrics.SAMPLED_TOKENS.inc(result.transcript.num_sampled)
    if result.num_replayed_turns:
        metrics.REPLAYED_TURNS.inc(result.num_replayed_turns)
    if result.num_restarts:
        metrics.REPLAY_MISMATCHES.inc(result.num_restarts)
    for name in metrics.OF_EPISODES.keys() & result.metrics.keys():
        metrics.OF_EPISODES[name].inc(result.metrics[name])
    if num_nonfinite := result.transcript.num_nonfinite:
        metrics.NONFINITE_LOGPROBS.inc(num_nonfinite)
    if result.outcome is Outcome.INFRA_FAILURE:
        log.warning("episode failed", episode_id=task.episode_id, reason=result.reason)
