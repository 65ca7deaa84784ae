"""Executor of the core's decisions, in Redis and by messages to workers and servers."""

import asyncio
import itertools
import uuid
from collections.abc import Sequence

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.log import get_logger
from tailrace_protos import subjects
from tailrace_protos.control import DrainRequest, EpisodesStopped, ProbeRequest, ServerStatus
from tailrace_protos.episode import EpisodeTask
from tailrace_scheduler.core.decisions import (
    AdmitGroup,
    BeginGroups,
    DeferGroups,
    DrainServer,
    Emit,
    EndTraining,
    ForgetGroup,
    PublishEpisode,
    Republish,
    SettleMembers,
    StoreDecision,
)
from tailrace_scheduler.ports import GroupPlan, GroupStore

log = get_logger(__name__)

DRAIN_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 5.0


class Executor:
    """Carries out decisions of one run; each may be repeated.

    An event is written once by this scheduler. Another one decides on it again if the log that it
    replayed does not have it, as after a power failure.
    """

    def __init__(self, run: str, bus: Bus, store: GroupStore) -> None:
        self._id = uuid.uuid4().hex
        self._run = run
        self._bus = bus
        self._store = store

    async def probe(self, server_id: str) -> bool:
        """Let a server sample a token; False if it fails or does not answer."""
        subject = subjects.inference_probe(self._run, server_id)
        try:
            await self._bus.request(subject, ProbeRequest(), ServerStatus, timeout_s=PROBE_TIMEOUT_S)
        except (NoResponderError, CallTimeoutError, CallFailedError) as error:
            log.warning("probe of a failing server failed", server_id=server_id, reason=str(error))
            return False
        log.info("probe of a failing server succeeded", server_id=server_id)
        return True

    async def carry_out(self, decisions: Sequence[StoreDecision]) -> tuple[int, list[EpisodeTask]]:
        """Carry out the first decisions, those of one kind.

        Returns how many they were, and the episodes to be published for them. Every decision may be
        carried out again.
        """
        batch = _first_of_a_kind(decisions)
        return len(batch), await self._do(batch)

    async def _do(self, decisions: Sequence[StoreDecision]) -> list[EpisodeTask]:
        admitted = [decision.plan for decision in decisions if isinstance(decision, AdmitGroup)]
        await self._store.record(admitted)
        others = await asyncio.gather(
            *(self._do_one(decision) for decision in decisions if not isinstance(decision, AdmitGroup))
        )
        return [episode for episode in others if episode is not None]

    async def _do_one(
        self,
        decision: PublishEpisode
        | BeginGroups
        | DeferGroups
        | SettleMembers
        | Republish
        | ForgetGroup
        | EndTraining
        | Emit
        | DrainServer,
    ) -> EpisodeTask | None:
        store = self._store
        match decision:
            case PublishEpisode(task):
                return task
            case Emit(once, body):
                await store.emit(f"{once}/{self._id}", body)
            case BeginGroups(steps):
                await store.begin(dict(steps))
            case DeferGroups(steps):
                await store.begin(dict(steps), defer=True)
            case EndTraining(lineage):
                await store.end_training(lineage)
            case ForgetGroup(group_id, phase, num_members, is_sent):
                log.error(
                    "writes of a group were lost: it is closed", group_id=group_id, is_sent=is_sent
                )
                await store.forget(group_id, phase, num_members, is_sent=is_sent)
            case DrainServer():
                await self._drain(decision)
            case SettleMembers(group_id, members, outcome, reason):
                await store.settle(group_id, members, outcome, reason)
                await self._stop(group_id, members, reason)
            case Republish(plan, member, reason):
                return await self._again(plan, member, reason)
        return None

    async def _again(self, plan: GroupPlan, member: int, reason: str) -> EpisodeTask | None:
        """Return the task of the member's next attempt; None if it has settled."""
        attempt = await self._store.raise_attempt(plan.group_id, member, reason)
        log.warning("episode goes out again", episode_id=f"{plan.group_id}.{member}", attempt=attempt)
        return None if attempt is None else plan.episode(member, attempt)

    async def _stop(self, group_id: str, members: Sequence[int], reason: str) -> None:
        """Tell workers to stop settled episodes; who does not hear it plays to the end, in vain."""
        stopped = EpisodesStopped(tuple(f"{group_id}.{member}" for member in members), reason)
        await self._bus.publish(subjects.episodes_stopped(self._run), stopped)

    async def _drain(self, decision: DrainServer) -> None:
        """Ask a server to leave; one that does not answer is asked again while it shows itself."""
        server_id, incarnation, reason = decision
        subject = subjects.inference_control(self._run, server_id)
        request = DrainRequest(reason, incarnation)
        try:
            await self._bus.request(subject, request, ServerStatus, timeout_s=DRAIN_TIMEOUT_S)
        except (NoResponderError, CallTimeoutError, CallFailedError) as error:
            log.warning(
                "server did not hear that it shall leave", server_id=server_id, error=str(error)
            )
        else:
            log.warning("server told to leave", server_id=server_id, reason=reason)


def _first_of_a_kind(decisions: Sequence[StoreDecision]) -> list[StoreDecision]:
    """The longest start of `decisions` that is all of one type."""
    kind = type(decisions[0])
    return list(itertools.takewhile(lambda one: type(one) is kind, decisions))
