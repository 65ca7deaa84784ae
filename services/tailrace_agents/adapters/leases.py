"""Placement by the scheduler: leases asked for in batches, endings reported in batches.

While the scheduler is away or no server is healthy, asking goes on with growing delays: an episode
that waits for a server is late, not failed. Its deadline ends the waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.channel.ports import Address
from tailrace.retry import Backoff
from tailrace_agents.core.batching import Batcher
from tailrace_protos import subjects
from tailrace_protos.control import LeaseReply, LeaseReport, LeaseRequest

_CALL_TIMEOUT_S = 5.0


class _Question(NamedTuple):
    episode_id: str
    predicted_tokens: int


class _Later(NamedTuple):
    """No lease now."""

    retry_after_s: float


class LeaseClient:
    """`Placement` over the bus. Call `report` a few times a second."""

    def __init__(self, bus: Bus, run: str, worker_id: str) -> None:
        self._bus = bus
        self._run = run
        self._worker_id = worker_id
        self._batchers: dict[str, Batcher[_Question, Address | _Later]] = {}  # by failed server id
        self._released: list[str] = []
        self._failures: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()

    async def lease(
        self, episode_id: str, predicted_tokens: int, failed_server_id: str = ""
    ) -> Address:
        """See `Placement`."""
        backoff = Backoff(0.05, 2.0)
        while True:
            answer = await self._batcher(failed_server_id).submit(
                _Question(episode_id, predicted_tokens)
            )
            if isinstance(answer, Address):
                return answer
            await asyncio.sleep(max(answer.retry_after_s, backoff.next_s()))

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """See `Placement`."""
        (self._successes if succeeded else self._failures)[server_id] += 1

    def release(self, episode_id: str) -> None:
        """See `Placement`."""
        self._released.append(episode_id)

    async def report(self) -> None:
        """Tell the scheduler what ended since the last report."""
        if not (self._released or self._failures or self._successes):
            return
        report = LeaseReport(
            self._worker_id, tuple(self._released), dict(self._failures), dict(self._successes)
        )
        self._released = []
        self._failures.clear()
        self._successes.clear()
        await self._bus.publish(subjects.lease_report(self._run), report)

    def _batcher(self, failed_server_id: str) -> Batcher[_Question, Address | _Later]:
        batcher = self._batchers.get(failed_server_id)
        if batcher is None:
            batcher = self._batchers[failed_server_id] = Batcher(partial(self._ask, failed_server_id))
        return batcher

    async def _ask(
        self, failed_server_id: str, questions: Sequence[_Question]
    ) -> list[Address | _Later]:
        request = LeaseRequest(
            self._worker_id,
            tuple(question.episode_id for question in questions),
            tuple(question.predicted_tokens for question in questions),
            failed_server_id,
        )
        try:
            reply = await self._bus.request(
                subjects.lease(self._run), request, LeaseReply, timeout_s=_CALL_TIMEOUT_S
            )
        except (NoResponderError, CallTimeoutError):
            return [_Later(0.0)] * len(questions)
        except CallFailedError as error:
            return [_Later(error.retry_after_s)] * len(questions)
        leases = {lease.episode_id: Address.of(lease) for lease in reply.leases}
        later = _Later(reply.retry_after_s)
        return [leases.get(question.episode_id, later) for question in questions]
