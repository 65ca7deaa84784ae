"""Player of a user's workflow: a session with the gateway, the workflow's run, its rows.

A workflow cannot be resumed: a worker that takes over the episode plays it from the start, in a new
session. It loads the journal, which holds nothing, so that the earlier worker notices.

Invariants: a session that was opened is closed, however the episode ends; a workflow starts only when
its runner has room for it, so that no session waits; a worker whose episode was taken over neither ends
the new session nor settles the episode.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from tailrace.sdk.agent_loop import EpisodeEnd, LoopLimits
from tailrace.sdk.workflow import WorkflowEnd
from tailrace_agents.core.episode import EpisodeInfraError, EpisodeResult
from tailrace_agents.core.machine import Episode, PlayContext
from tailrace_agents.core.transcript import SessionTranscript
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import OVER_BUDGET, EpisodeTask, Outcome
from tailrace_protos.session import (
    ExportSession,
    ExportStyle,
    OpenSession,
    RewardScope,
    SessionExport,
    SessionLimits,
    SessionOpened,
)


class SessionFailedError(EpisodeInfraError):
    """The gateway did not do what an episode needs."""


class RunnerFailedError(EpisodeInfraError):
    """The workflow could not be run, through no fault of this episode."""


class EpisodeSessions(Protocol):
    """Sessions with a gateway."""

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """Opens a session; waits while no gateway answers; raises `SessionFailedError`.

        `anew`: delete an earlier session of this episode.
        """

    async def export(self, request: ExportSession) -> SessionExport:
        """Exports the session's rows; raises `SessionFailedError`."""

    def close(self, opened: SessionOpened) -> None:
        """Deletes this session, in the background; never a later one of the same episode."""


class Seat(Protocol):
    """Room for one episode."""

    async def run(self, data: dict[str, Any], access: SessionOpened, timeout_s: float) -> WorkflowEnd:
        """Runs the workflow on a row. Cancelling this ends the run."""


class WorkflowRunner(Protocol):
    """Runner of a workflow: in the event loop, or in processes."""

    def seat(self) -> AbstractAsyncContextManager[Seat]:
        """Waits for room for one episode; raises `RunnerFailedError`."""


class WorkflowTerms(NamedTuple):
    """Export and time limit of a workflow's runs."""

    export_style: ExportStyle
    turn_discount: float
    timeout_s: float
    reward_scope: RewardScope = RewardScope.EPISODE


class WorkflowPlayer:
    """`EpisodePlayer` of rows that a workflow plays."""

    is_stoppable = True

    def __init__(
        self,
        runner: WorkflowRunner,
        sessions: EpisodeSessions,
        context: PlayContext,
        limits: LoopLimits,
        terms: WorkflowTerms,
        row_of: Callable[[EpisodeTask], dict[str, Any]],
    ) -> None:
        self._runner = runner
        self._sessions = sessions
        self._context = context
        self._limits = limits
        self._terms = terms
        self._row_of = row_of

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        episode = Episode(task, self._context, self._limits, self._row_of(task))

        async def run() -> EpisodeEnd:
            async with self._runner.seat() as seat:
                episode.require_running()
                await journal.load()
                return await self._run(episode, seat, anew=journal.may_have_records)

        result = await episode.play(run)
        await journal.require_own()
        return result

    async def _run(self, episode: Episode, seat: Seat, *, anew: bool) -> EpisodeEnd:
        episode.transcript = SessionTranscript()
        opened = await self._sessions.open(opening_of(episode), anew=anew)
        try:
            end = await seat.run(episode.row, opened, self._terms.timeout_s)
            return await end_of_session(episode, self._sessions, self._terms, end, opened.api_key)
        finally:
            self._sessions.close(opened)


async def end_of_session(
    episode: Episode,
    sessions: EpisodeSessions,
    terms: WorkflowTerms,
    end: WorkflowEnd,
    api_key: str = "",
) -> EpisodeEnd:
    """Takes over the rows of the episode's session; judges the end by what the gateway knows.

    `api_key`: of the session; empty: of whichever session the episode has. Raises `SessionFailedError`
    if a valid end has no export.
    """
    request = ExportSession(
        episode.task.episode_id,
        end.rewards or {"": 0.0},
        terms.export_style,
        terms.turn_discount,
        terms.reward_scope,
        api_key,
    )
    transcript = SessionTranscript()
    try:
        transcript.take(await sessions.export(request))
    except SessionFailedError:
        if end.outcome.is_valid:
            raise
        return EpisodeEnd(end.outcome, end.reason)
    judged = _judged(end, transcript)
    if judged.outcome.is_valid:
        episode.transcript = transcript
    return judged


def _judged(end: WorkflowEnd, transcript: SessionTranscript) -> EpisodeEnd:
    """Lets what the gateway knows of the calls overrule an end that the code could not explain."""
    outcome, reason = end.outcome, end.reason
    if not transcript.num_turns and (outcome.is_valid or transcript.is_over_budget):
        why = ", ".join(transcript.faults) or "use the base_url and the key of its episode"
        reason = f"the workflow ended without a model call that the gateway answered: {why}"
        return EpisodeEnd(Outcome.INFRA_FAILURE, reason)
    is_policys = transcript.is_over_budget or (
        outcome is Outcome.INFRA_FAILURE and bool(transcript.faults)
    )
    if not outcome.is_valid and is_policys:
        outcome, reason = Outcome.POLICY_FAILURE, f"{', '.join(transcript.faults)}: {reason}"
    return EpisodeEnd(outcome, reason, {OVER_BUDGET: 1.0} if transcript.is_over_budget else {})


def opening_of(episode: Episode) -> OpenSession:
    """Makes the request that opens an episode's session."""
    limits = SessionLimits(
        max_episode_tokens=episode.limits.max_episode_tokens,
        max_new_tokens=episode.limits.max_new_tokens,
        deadline_unix_s=episode.task.deadline_unix_s,
    )
    plan = episode.sampling
    return OpenSession(episode.task.episode_id, limits, plan.params, plan.seed)
