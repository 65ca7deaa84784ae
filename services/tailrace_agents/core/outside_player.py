"""Player of rows that agents outside of the cluster play.

The worker offers the row and waits. A gateway leases it to an agent, opens its session and takes its
end.

Invariants: an episode's time counts from its first lease, and its group waits for that; an offer
outlives its worker: a worker that takes the episode over finds the agent's lease, or its end, and gives
the agent's session its whole time again; what an agent has ended is closed once it is settled, so that
its end is not lost with the worker; what ends otherwise is closed before, so that no late reward is
taken, and one that was taken counts; a worker that drains leaves the offer to the next.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from tailrace.log import get_logger
from tailrace.sdk.agent_loop import EpisodeEnd, LoopLimits
from tailrace.sdk.workflow import WorkflowEnd
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.machine import Episode, PlayContext
from tailrace_agents.core.transcript import SessionTranscript
from tailrace_agents.core.workflow_player import (
    EpisodeSessions,
    SessionFailedError,
    WorkflowTerms,
    end_of_session,
    opening_of,
)
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.session import OutsideOffer, OutsideResult, SessionExport, SessionOpened

log = get_logger(__name__)

_UNTIL_LEASED_S = 1e8
_LAST_LOOK_S = 10.0  # at the session of an episode that no agent ended


class OutsideDesk(Protocol):
    """Offers of episodes to outside agents."""

    async def offer(self, offer: OutsideOffer) -> bool:
        """Offers an episode, or finds its offer; tells whether an agent has it already."""

    async def result_of(
        self, episode_id: str, watch: Callable[[float | None], None]
    ) -> tuple[float, OutsideResult | None]:
        """Waits for an offered episode; returns its first lease's time, and the agent's end.

        Without an end, the scheduler has closed its group. Calls `watch` with the time of the first
        lease while it waits; what that raises ends the wait, and the offer stays.
        """

    async def end(self, episode_id: str, outcome: Outcome) -> None:
        """Ends an offer."""

    async def give_up(self, episode_id: str, outcome: Outcome) -> OutsideResult | None:
        """Ends an offer that its agent has not ended; returns the agent's end if there is one."""


class _AgentLateError(Exception):
    """The time of an episode is over: `started_unix_s`, of its first lease."""

    def __init__(self, started_unix_s: float) -> None:
        super().__init__(started_unix_s)
        self.started_unix_s = started_unix_s


class OutsidePlayer:
    """`EpisodePlayer` of rows that outside agents play."""

    is_stoppable = False  # the desk sees it, and ends the offer

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
        unbounded = replace(task, deadline_unix_s=self._context.clock.unix_s() + _UNTIL_LEASED_S)
        episode = Episode(unbounded, self._context, self._limits, self._row_of(task))
        found: OutsideResult | None = None

        async def run() -> EpisodeEnd:
            nonlocal found
            end, found = await self._wait(episode)
            return end if found is None else await self._end_of(episode, found)

        result = await episode.play(run)

        async def close() -> None:
            await self._desk.end(task.episode_id, result.outcome)
            self._sessions.close(SessionOpened(task.episode_id, "", ""))  # whoever opened it

        if found is None:
            await close()
        else:
            result.after_settlement = close
        return result

    async def _wait(self, episode: Episode) -> tuple[EpisodeEnd, OutsideResult | None]:
        """Offers the episode and waits for the agent's end; without it, returns how it ended."""
        task, stages = episode.task, self._context.stages
        timeout_s = min(task.timeout_s or self._terms.timeout_s, self._terms.timeout_s)
        offer = OutsideOffer(
            opening_of(episode),
            task.group_id,
            task.member,
            task.phase,
            task.task.env_name,
            episode.row,
            self._lease_s,
            timeout_s,
        )

        def watch(started_unix_s: float | None) -> None:
            episode.require_running()
            if started_unix_s is None:
                return
            stages.unleased.pop(task.episode_id, None)
            if self._context.clock.unix_s() > started_unix_s + timeout_s:
                raise _AgentLateError(started_unix_s)

        stages.unleased[task.episode_id] = task.group_id
        renewal: asyncio.Task[None] | None = None
        try:
            if await self._desk.offer(offer):
                renewal = asyncio.create_task(self._renew_session(offer))
            started_unix_s, found = await self._desk.result_of(task.episode_id, watch)
        except _AgentLateError as late:
            started_unix_s = late.started_unix_s
            end = await self._late_end(episode, f"no agent ended the episode within {timeout_s:g} s")
            # The agent may have ended it since the last look; then it was told so.
            found = await self._desk.give_up(task.episode_id, end.outcome)
            if found is None:
                episode.task = replace(task, deadline_unix_s=started_unix_s + timeout_s)
                return end, None
        finally:
            stages.unleased.pop(task.episode_id, None)
            if renewal is not None:
                renewal.cancel()
        episode.task = replace(task, deadline_unix_s=started_unix_s + timeout_s)
        return EpisodeEnd(Outcome.TIMEOUT, "the scheduler closed its group"), found

    async def _late_end(self, episode: Episode, reason: str) -> EpisodeEnd:
        """Judges an episode that no agent ended: a policy that used up its tokens has failed."""
        told = WorkflowEnd(Outcome.TIMEOUT, reason)
        try:
            async with asyncio.timeout(_LAST_LOOK_S):
                return await end_of_session(episode, self._sessions, self._terms, told)
        except TimeoutError:
            return EpisodeEnd(told.outcome, reason)

    async def _renew_session(self, offer: OutsideOffer) -> None:
        """Opens the session of an agent that outlived a stop or a worker again, with the whole time."""
        opening = offer.opening
        deadline_unix_s = self._context.clock.unix_s() + offer.timeout_s
        limits = replace(opening.limits, deadline_unix_s=deadline_unix_s)
        try:
            await self._sessions.open(replace(opening, limits=limits), anew=False)
        except SessionFailedError as error:  # the agent's next lease opens it
            log.warning("session not renewed", episode_id=opening.episode_id, reason=str(error))

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
