"""Client of the scheduler's placement: requests leases in batches, reports endings and activity.

While the scheduler is down or no server is healthy, requests are repeated with growing delays. An
episode that waits for a server has not failed; its deadline ends the wait.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.channel.ports import Address
from tailrace.log import get_logger
from tailrace.policy.activity import Stages
from tailrace.policy.batching import Batcher
from tailrace.retry import Backoff
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, LeaseReply, LeaseReport, LeaseRequest

log = get_logger(__name__)

_CALL_TIMEOUT_S = 5.0
_DELAY_S = 0.002
_REPORT_EVERY_S = 0.1


class _Question(NamedTuple):
    episode_id: str
    predicted_tokens: int


class _Later(NamedTuple):
    """No lease before this time of the event loop."""

    at_s: float


class LeaseClient:
    """`ServerPlacement` over the bus. Call `report` a few times a second."""

    def __init__(self, bus: Bus, run: str, worker_id: str) -> None:
        self._bus = bus
        self._run = run
        self._worker_id = worker_id
        self._batchers: dict[str, Batcher[_Question, Address | _Later]] = {}  # by failed server id
        self._released: list[str] = []
        self._failures: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()
        self._backoff = Backoff(0.05, 2.0)
        self._waiting_for = ""

    async def lease(
        self, episode_id: str, predicted_tokens: int, failed_server_id: str = ""
    ) -> Address:
        """See `ServerPlacement`."""
        question = _Question(episode_id, predicted_tokens)
        while True:
            answer = await self._batcher(failed_server_id).submit(question)
            if isinstance(answer, Address):
                return answer
            # Requests that were refused together are repeated together, in one message.
            await asyncio.sleep(answer.at_s - asyncio.get_running_loop().time())

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """See `ServerPlacement`."""
        (self._successes if succeeded else self._failures)[server_id] += 1

    def release(self, episode_id: str) -> None:
        """See `ServerPlacement`."""
        self._released.append(episode_id)

    async def report(self) -> None:
        """Reports to the scheduler the calls and episodes that ended since the last report."""
        if not (self._released or self._failures or self._successes):
            return
        report = LeaseReport(
            self._worker_id, tuple(self._released), dict(self._failures), dict(self._successes)
        )
        self._released = []
        self._failures.clear()
        self._successes.clear()
        try:
            await self._bus.publish(subjects.lease_report(self._run), report)
        except asyncio.CancelledError:  # the reporting loop ends; the drain sends the last report
            self._released = [*report.released, *self._released]
            self._failures.update(report.failures)
            self._successes.update(report.successes)
            raise

    def _batcher(self, failed_server_id: str) -> Batcher[_Question, Address | _Later]:
        batcher = self._batchers.get(failed_server_id)
        if batcher is None:
            batcher = self._batchers[failed_server_id] = Batcher(
                partial(self._ask, failed_server_id), delay_s=_DELAY_S
            )
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
        except (NoResponderError, CallTimeoutError) as error:
            return [self._later(str(error), 0.0)] * len(questions)
        except CallFailedError as error:
            return [self._later(str(error), error.retry_after_s)] * len(questions)
        if not reply.leases:
            return [self._later("a healthy inference server", reply.retry_after_s)] * len(questions)
        self._backoff.reset()
        self._wait_for("")
        return [Address.of(lease) for lease in reply.leases]

    def _later(self, waiting_for: str, retry_after_s: float) -> _Later:
        self._wait_for(waiting_for)
        delay_s = max(retry_after_s, self._backoff.next_s())
        return _Later(asyncio.get_running_loop().time() + delay_s)

    def _wait_for(self, what: str) -> None:
        """Logs the reason that episodes wait, when it changes."""
        if what != self._waiting_for:
            self._waiting_for = what
            if what:
                log.warning("episodes wait for placement", waiting_for=what)
            else:
                log.info("episodes are placed again")


class Reporter:
    """Reports the activity and the leases of one worker; `run` is a loop of its service.

    The scheduler takes back the leases of a worker that stops reporting.
    """

    def __init__(self, bus: Bus, run: str, worker_id: str, stages: Stages, leases: LeaseClient) -> None:
        self._bus = bus
        self._subject = subjects.activity(run)
        self._worker_id = worker_id
        self._stages = stages
        self._leases = leases

    async def run(self) -> None:
        """Reports until cancelled; call `LeaseClient.report` once more on drain."""
        stages = self._stages
        while True:
            activity = AgentActivity(
                worker_id=self._worker_id,
                num_generating=stages.num_generating,
                num_in_tools=stages.num_in_tools,
                num_in_reward=stages.num_in_reward,
                num_settling=stages.num_settling,
                unix_s=time.time(),
                waiting_groups=tuple(set(stages.unleased.values())),
            )
            await self._bus.publish(self._subject, activity)
            await self._leases.report()
            await asyncio.sleep(_REPORT_EVERY_S)
