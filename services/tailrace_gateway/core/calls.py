"""Model calls of sessions: start, join by retries, replay of recorded answers, cancellation.

Invariants: a retry samples nothing if its call has an answer or runs in any replica; a call without
listeners is cancelled; at most `max_concurrent` calls run in this replica.
"""

import asyncio
from functools import partial

from tailrace.clock import Clock
from tailrace.store.errors import MALFORMED
from tailrace_gateway import metrics
from tailrace_gateway.core.call import Completion, ModelCall
from tailrace_gateway.core.capture import Capture, completion_of
from tailrace_gateway.core.claims import Claims
from tailrace_gateway.core.errors import (
    BudgetSpentError,
    ContextOverflowError,
    OverloadedError,
    SessionOverError,
    UnavailableError,
)
from tailrace_gateway.core.in_flight import InFlightCall
from tailrace_gateway.core.output_constraints import check_schema, check_tools
from tailrace_gateway.core.prompts import PromptBuilder
from tailrace_gateway.core.sampling import Sampler
from tailrace_gateway.core.session import Session
from tailrace_gateway.core.sessions import Sessions

_RETRY_AFTER_S = 1.0


class ModelCalls:
    """Starts calls and holds those in flight; thousands run at once."""

    def __init__(
        self,
        sessions: Sessions,
        prompter: PromptBuilder,
        sampler: Sampler,
        capture: Capture,
        claims: Claims,
        clock: Clock,
        *,
        max_concurrent: int,
    ) -> None:
        self._sessions = sessions
        self._prompter = prompter
        self._sampler = sampler
        self._capture = capture
        self._claims = claims
        self._clock = clock
        self._max_concurrent = max_concurrent
        self.is_draining = False
        self.running: set[InFlightCall] = set()

    async def begin(
        self, session_id: str, call: ModelCall, name: str, *, is_retry: bool, streams: bool
    ) -> InFlightCall:
        """Return a call in flight to listen to: a new one, or for a retry the running call of this
        name.

        A request and its retries share `name`. The caller must `leave` the call at the end.
        """
        self._require_room()
        check_schema(call.constraints)
        check_tools(call.tools)
        under_way = self._under_way(session_id, name) if is_retry else None
        session = None if is_retry else self._sessions.use(session_id)
        if session is None:
            session, _ = await self._sessions.refresh(session_id)
        running = (under_way or self._under_way(session_id, name)) if is_retry else None
        if running is None or not running.is_joinable:
            self._require_room()  # others may have begun while the store was read
            running = InFlightCall(streams)
            session.calls.add(running)
            session.by_name[name] = running
            self.running.add(running)
            work = self._work(session, call, name, running, is_retry=is_retry)
            running.start(work, partial(self._end, session, name, running))
        else:
            metrics.COALESCED.inc()
        running.join()
        return running

    def _end(self, session: Session, name: str, running: InFlightCall) -> None:
        """Remove a call that is over, also one that was cancelled before it did anything."""
        self.running.discard(running)
        session.calls.discard(running)
        if session.by_name.get(name) is running:
            del session.by_name[name]

    def _under_way(self, session_id: str, name: str) -> InFlightCall | None:
        """Return the call that a retry can join.

        `begin` calls this before and after it reads the store: a call that finishes in between is in
        neither the store's answer nor the second lookup.
        """
        session = self._sessions.known(session_id)
        running = None if session is None else session.by_name.get(name)
        return running if running is not None and running.is_joinable else None

    async def count_tokens(self, session_id: str, call: ModelCall) -> int:
        """Return the number of prompt tokens of a call."""
        session, _ = await self._sessions.refresh(session_id)
        return sum(len(one.prompt_ids) for one in await self._prompter.prompts(session, call))

    def _require_room(self) -> None:
        if self.is_draining:
            raise _draining_error()
        if len(self.running) >= self._max_concurrent:
            reason = f"{len(self.running)} calls are in flight in this gateway"
            raise OverloadedError(reason, retry_after_s=_RETRY_AFTER_S)

    async def _work(
        self, session: Session, call: ModelCall, name: str, running: InFlightCall, *, is_retry: bool
    ) -> Completion:
        try:
            if is_retry:
                completion = await self._answer_again(session, call, name, running)
            else:
                completion = await self._sample(session, call, name, running)
            self._sampler.refuse_broken(call.constraints, completion)
            return completion
        except (ContextOverflowError, BudgetSpentError) as error:
            await self._capture.keep_refusal(session, error.code)
            raise

    async def _answer_again(
        self, session: Session, call: ModelCall, name: str, running: InFlightCall
    ) -> Completion:
        """Replay the recorded answer, from any replica; else sample, once over all replicas."""
        async with self._claims.hold(session.session_id, name):
            session, answer = await self._sessions.refresh(session.session_id, name)
            if answer is None:
                return await self._sample(session, call, name, running)
        metrics.COALESCED.inc()
        try:
            return completion_of(answer, session, running)
        except MALFORMED as error:
            raise await self._sessions.set_aside(
                session.session_id, session.nonce, error, answer
            ) from error

    async def _sample(
        self, session: Session, call: ModelCall, name: str, running: InFlightCall
    ) -> Completion:
        if self._is_late(session):  # another replica may have given it more time
            session, _ = await self._sessions.refresh(session.session_id)
        self._require_open(session)
        prompts = await self._prompter.prompts_at_hand(session, call)
        if not prompts:
            session, _ = await self._sessions.refresh(session.session_id)
            self._require_open(session)
            prompts = await self._prompter.prompts(session, call)
        return await self._sampler.sample(session, call, prompts, name, running)

    def _require_open(self, session: Session) -> None:
        if not session.is_open:
            raise SessionOverError(f"the session {session.session_id!r} takes no more calls")
        if self._is_late(session):
            raise session.deadline_error()

    def _is_late(self, session: Session) -> bool:
        return session.record.limits.deadline_unix_s <= self._clock.unix_s()

    async def drain(self, grace_s: float) -> None:
        """Let calls finish within `grace_s`, then cancel the rest."""
        tasks = {running.task for running in self.running if running.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for running in list(self.running):
            running.cancel(_draining_error())


def _draining_error() -> UnavailableError:
    return UnavailableError("this gateway is stopping: send the request again", retry_after_s=0.0)
