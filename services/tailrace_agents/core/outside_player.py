"""Player of rows that agents outside of the cluster play.

The worker offers the row and waits. A gateway leases it to an agent, opens its session and takes its
end.

Invariants: an offer outlives its worker: a worker that takes the episode over finds the agent's lease,
or its end; an episode that has ended is closed, so that no agent gets it any more; a worker that drains
leaves the offer to the next one.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tailrace.sdk.agent_loop import EpisodeEnd, LoopLimits
from tailrace.sdk.workflow import WorkflowEnd
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.machine import Episode, PlayContext
from tailrace_agents.core.transcript import SessionTranscript
from tailrace_agents.core.workflow_player import (
    EpisodeSessions,
    WorkflowTerms,
    end_of_session,
    opening_of,
)
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.session import OutsideOffer, OutsideResult, SessionExport, SessionOpened


class OutsideDesk(Protocol):
    """Offers of episodes to outside agents."""

    async def result_of(
        self, offer: OutsideOffer, require_running: Callable[[], None]
    ) -> OutsideResult:
        """Offers an episode, or finds its offer; returns the end that an agent sent.

        Calls `require_running` while it waits; what that raises ends the wait, and the offer stays.
        """

    async def end(self, episode_id: str, outcome: Outcome) -> None:
        """Ends an offer."""


class OutsidePlayer:
    """`EpisodePlayer` of rows that outside agents play."""

    def __init__(
        self,
        desk: OutsideDesk,
        sessions: EpisodeSessions,
        context: PlayContext,
        limits: LoopLimits,
        terms: WorkflowTerms,
        lease_s: float,
        row_of: Callable[[EpisodeTask], dict[str, Any]],
    ) -> None:
        self._desk = desk
        self._sessions = sessions
        self._context = context
        self._limits = limits
        self._terms = terms
        self._lease_s = lease_s
        self._row_of = row_of

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        episode = Episode(task, self._context, self._limits, self._row_of(task))
        result = await episode.play(lambda: self._run(episode))
        await self._desk.end(task.episode_id, result.outcome)
        self._sessions.close(SessionOpened(task.episode_id, "", ""))  # whoever opened it
        return result

    async def _run(self, episode: Episode) -> EpisodeEnd:
        task, timeout_s = episode.task, self._terms.timeout_s
        episode.require_running()
        offer = OutsideOffer(
            opening_of(episode),
            task.group_id,
            task.member,
            task.phase,
            task.task.env_name,
            episode.row,
            self._lease_s,
        )
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                found = await self._desk.result_of(offer, episode.require_running)
        except TimeoutError:
            if not deadline.expired():
                raise
            return EpisodeEnd(Outcome.TIMEOUT, f"no agent ended the episode within {timeout_s:g} s")
        return await self._end_of(episode, found)

    async def _end_of(self, episode: Episode, found: OutsideResult) -> EpisodeEnd:
        episode.transcript = transcript = SessionTranscript()
        if found.rows:
            counts = {"num_calls": float(sum(len(row.turn_ends) // 4 for row in found.rows))}
            rewards = tuple(found.rewards.values())
            transcript.take(SessionExport(found.rows, "", found.messages, rewards, counts))
            return EpisodeEnd(found.outcome, found.reason, found.metrics)
        reason = found.reason or ("" if found.outcome.is_valid else "the agent reported it")
        told = WorkflowEnd(found.outcome, reason, found.rewards)
        end = await end_of_session(episode, self._sessions, self._terms, told)
        return end._replace(metrics={**found.metrics, **end.metrics})
