"""An episode played by a user's workflow: a session of the gateway, the workflow's run, its rows.

A workflow cannot be resumed: whoever gets the episode after another worker plays it from the start, in
a session of its own.

Invariants: a session that was opened is closed, however the episode ends; a workflow starts only when
its runner has room for it, so that no session waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from tailrace.sdk.workflow import WorkflowEnd
from tailrace_agents.core.episode import EpisodeHandedBackError, EpisodeResult
from tailrace_agents.core.players import PlayContext
from tailrace_agents.core.tokens import CheckedRows
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.base import as_uint8
from tailrace_protos.episode import OVER_BUDGET, EpisodeTask, Outcome
from tailrace_protos.session import (
    ExportSession,
    ExportStyle,
    OpenSession,
    SessionExport,
    SessionLimits,
    SessionOpened,
)


class SessionFailedError(Exception):
    """The gateway did not do what an episode needs."""


class RunnerFailedError(Exception):
    """The workflow could not be run, through no fault of this episode."""


class Sessions(Protocol):
    """Sessions with the gateway."""

    async def open(self, request: OpenSession, *, anew: bool) -> SessionOpened:
        """Open one; waits while no gateway answers; raises `SessionFailedError`.

        `anew`: forget what was said under this episode's name before.
        """

    async def export(self, request: ExportSession) -> SessionExport:
        """Its rows; raises `SessionFailedError`."""

    def close(self, session_id: str) -> None:
        """Forget it, in the background."""


class Seat(Protocol):
    """Room for one episode."""

    async def run(self, data: dict[str, Any], access: SessionOpened, timeout_s: float) -> WorkflowEnd:
        """Run the workflow on a row. Cancelling this ends the run."""


class WorkflowRunner(Protocol):
    """Where a workflow runs."""

    def seat(self) -> AbstractAsyncContextManager[Seat]:
        """Room for one episode, once there is some; raises `RunnerFailedError`."""


class WorkflowTerms(NamedTuple):
    """How runs become rows, and how long they may take."""

    export_style: ExportStyle
    turn_discount: float
    timeout_s: float


class SessionBooks:
    """`EpisodeBooks` that the gateway kept."""

    def __init__(self, export: SessionExport) -> None:
        self._rows = export.rows
        self.turn_rewards = export.rewards
        self.num_turns = int(export.metrics.get("num_calls", 0))
        self.num_sampled = sum(int(np.count_nonzero(as_uint8(row.loss_mask))) for row in export.rows)

    def __len__(self) -> int:
        return sum(len(row.loss_mask) for row in self._rows)

    def rows(self, reward: float) -> CheckedRows:
        """The exported rows. What the reward service adds to the workflow's rewards goes to each row
        of a conversation that the workflow gave a reward."""
        added = reward - sum(self.turn_rewards)
        replace = msgspec.structs.replace
        rows = (
            replace(row, reward=row.reward + added) if added and row.has_reward else row
            for row in self._rows
        )
        return CheckedRows(tuple(rows), 0)


class WorkflowPlayer:
    """`EpisodePlayer` of rows that a workflow plays."""

    def __init__(
        self,
        runner: WorkflowRunner,
        sessions: Sessions,
        context: PlayContext,
        terms: WorkflowTerms,
        row_of: Callable[[EpisodeTask], dict[str, Any]],
    ) -> None:
        self._runner = runner
        self._sessions = sessions
        self._context = context
        self._terms = terms
        self._row_of = row_of

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        """See `EpisodePlayer`."""
        row = self._row_of(task)
        deadline = asyncio.timeout(self._context.wall_clock_s(task))
        try:
            async with deadline, self._runner.seat() as seat:
                if self._context.is_draining():
                    raise EpisodeHandedBackError
                result = await self._play(task, row, seat, anew=journal.may_have_records)
        except TimeoutError:
            if not deadline.expired():
                raise
            result = EpisodeResult(Outcome.TIMEOUT, "the deadline passed while the workflow was at it")
        except (SessionFailedError, RunnerFailedError) as error:
            result = EpisodeResult(Outcome.INFRA_FAILURE, str(error))
        result.row = row
        return result

    async def _play(
        self, task: EpisodeTask, row: dict[str, Any], seat: Seat, *, anew: bool
    ) -> EpisodeResult:
        opened = await self._sessions.open(self._request(task), anew=anew)
        try:
            end = await seat.run(row, opened, self._terms.timeout_s)
            if not end.outcome.is_valid:
                return EpisodeResult(end.outcome, end.reason)
            export = await self._sessions.export(
                ExportSession(
                    opened.session_id, end.rewards, self._terms.export_style, self._terms.turn_discount
                )
            )
        finally:
            self._sessions.close(opened.session_id)
        return _result(end, export)

    def _request(self, task: EpisodeTask) -> OpenSession:
        context = self._context
        plan = context.sampling(task)
        limits = SessionLimits(
            max_episode_tokens=context.max_episode_tokens,
            max_new_tokens=context.phases[task.phase].max_new_tokens,
            deadline_unix_s=task.deadline_unix_s,
        )
        return OpenSession(task.episode_id, limits, plan.params, plan.seed)


def _result(end: WorkflowEnd, export: SessionExport) -> EpisodeResult:
    if not export.rows:
        reason = (
            "the workflow ended without a model call that the gateway saw: use its base_url and key"
        )
        return EpisodeResult(Outcome.INFRA_FAILURE, reason, metrics=dict(export.metrics))
    metrics = {**export.metrics, **({OVER_BUDGET: 1.0} if end.is_over_budget else {})}
    return EpisodeResult(end.outcome, end.reason, SessionBooks(export), list(export.messages), metrics)
