"""Client of the scheduler's placement: requests leases in batches, reports endings and activity.

While the scheduler is down or no server is healthy, requests are repeated with growing delays. An
episode that waits for a server has not failed; its deadline ends the wait.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.channel.ports import Address
from tailrace.log import get_logger
from tailrace.policy.activity import Stages
from tailrace.policy.batching import Batcher
from tailrace.retry import Backoff
from tailrace_protos import subjects
from tailrace_protos.control import (
    AgentActivity,
    EpisodeState,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    SchedulerBegan,
)
from tailrace_protos.episode import Lease
from tailrace_protos.subjects import Phase

log = get_logger(__name__)

_CALL_TIMEOUT_S = 5.0
_DELAY_S = 0.002
_REPORT_EVERY_S = 0.1
_STATES_EVERY_S = 0.5
_HELD_S = 0.25  # until an episode that waits for room asks again


class _Question(NamedTuple):
    episode_id: str
    context_tokens: int


class _Later(NamedTuple):
    """No lease before this time of the event loop."""

    at_s: float
    is_away: bool = False  # no scheduler has answered


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
        self.ask_after_s = math.inf
        self._states: dict[str, EpisodeState] = {}  # of all episodes with a server
        self._changed: dict[str, None] = {}  # episodes of states not told yet
        self._told_s = 0.0

    async def lease(
        self,
        episode_id: str,
        context_tokens: int,
        failed_server_id: str = "",
        stay_at: Address | None = None,
    ) -> Address:
        """See `ServerPlacement`."""
        question = _Question(episode_id, context_tokens)
        while True:
            answer = await self._batcher(failed_server_id).submit(question)
            if isinstance(answer, _Later) and answer.is_away and stay_at is not None:
                answer = stay_at
            if isinstance(answer, Address):
                self.report_turn(episode_id, answer.server_id, context_tokens, is_over=False)
                return answer
            # Requests that were refused together are repeated together, in one message.
            await asyncio.sleep(answer.at_s - asyncio.get_running_loop().time())

    def take(self, lease: Lease) -> None:
        """See `ServerPlacement`."""
        if lease.ask_after_s:
            self.ask_after_s = lease.ask_after_s
        self.report_turn(lease.episode_id, lease.server_id, 0, is_over=True)

    def report_turn(
        self, episode_id: str, server_id: str, context_tokens: int, *, is_over: bool
    ) -> None:
        """See `ServerPlacement`."""
        self._states[episode_id] = EpisodeState(episode_id, server_id, context_tokens, is_over)
        self._changed[episode_id] = None

    async def on_scheduler_began(self, began: SchedulerBegan) -> None:
        """Tell a new scheduler the states of all episodes, with the next report."""
        self._changed = dict.fromkeys(self._states)
        self._told_s = 0.0

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """See `ServerPlacement`."""
        (self._successes if succeeded else self._failures)[server_id] += 1

    def release(self, episode_id: str) -> None:
        """See `ServerPlacement`."""
        self._released.append(episode_id)
        self._states.pop(episode_id, None)
        self._changed.pop(episode_id, None)

    async def report(self) -> None:
        """Reports to the scheduler the calls and episodes that ended since the last report."""
        states = self._due_states()
        if not (self._released or self._failures or self._successes or states):
            return
        report = LeaseReport(
            self._worker_id, tuple(self._released), dict(self._failures), dict(self._successes), states
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
            self._changed |= {state.episode_id: None for state in report.states}
            raise

    def _due_states(self) -> tuple[EpisodeState, ...]:
        """States to tell now: only the newest one of an episode, and not at every report."""
        now_s = asyncio.get_running_loop().time()
        if not self._changed or now_s - self._told_s < _STATES_EVERY_S:
            return ()
        changed, self._changed, self._told_s = self._changed, {}, now_s
        return tuple(self._states[one] for one in changed if one in self._states)

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
            tuple(question.context_tokens for question in questions),
            failed_server_id,
        )
        try:
            reply = await self._bus.request(
                subjects.lease(self._run), request, LeaseReply, timeout_s=_CALL_TIMEOUT_S
            )
        except (NoResponderError, CallTimeoutError, CallFailedError) as error:
            retry_after_s = error.retry_after_s if isinstance(error, CallFailedError) else 0.0
            return [self._later(str(error), retry_after_s)] * len(questions)
        return self._placed(reply, questions)

    def _placed(self, reply: LeaseReply, questions: Sequence[_Question]) -> list[Address | _Later]:
        """Answers of a reply, in the order of the questions."""
        self._backoff.reset()
        self._wait_for("" if reply.leases else "a healthy inference server with room")
        if reply.leases:
            self.ask_after_s = reply.leases[0].ask_after_s or math.inf
        leases = {lease.episode_id: lease for lease in reply.leases}
        later = _Later(asyncio.get_running_loop().time() + (reply.retry_after_s or _HELD_S))
        return [
            Address.of(leases[question.episode_id]) if question.episode_id in leases else later
            for question in questions
        ]

    def _later(self, waiting_for: str, retry_after_s: float) -> _Later:
        self._wait_for(waiting_for)
        delay_s = max(retry_after_s, self._backoff.next_s())
        return _Later(asyncio.get_running_loop().time() + delay_s, is_away=True)

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

    The scheduler takes back the leases of a worker that stops reporting. `context_limit`: tokens of the
    longest episode that it plays, `max_episodes`: episodes of each phase that it plays at once.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        worker_id: str,
        stages: Stages,
        leases: LeaseClient,
        *,
        context_limit: int = 0,
        max_episodes: Mapping[Phase, int] = MappingProxyType({}),
    ) -> None:
        self._bus = bus
        self._subject = subjects.activity(run)
        self._worker_id = worker_id
        self._stages = stages
        self._leases = leases
        self._context_limit = context_limit
        self._max_episodes = dict(max_episodes)

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
                context_limit=self._context_limit,
                max_episodes=self._max_episodes,
            )
            await self._bus.publish(self._subject, activity)
            await self._leases.report()
            await asyncio.sleep(_REPORT_EVERY_S)
