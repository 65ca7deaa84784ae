"""The groups that are open: recorded, and not all members settled.

A member is published when it gets a server; until then it costs its place in the group's range. Every
group closes: when its last member settles, or at its deadline, `timeout_s` after its last member was
published. The deadline moves while an agent outside of the cluster has still to lease one of its
episodes. What has not settled then is `cancelled` where the group has enough valid members without it,
and a `timeout` where it has not.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from tailrace_protos.episode import EpisodeTask, Lease, Outcome
from tailrace_protos.event import EpisodeRedelivered, EpisodeSettled
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.core.decisions import DeferGroups, ForgetGroup, Republish, SettleMembers
from tailrace_scheduler.core.streams.decisions import ProbeServer
from tailrace_scheduler.ports import GroupPlan, StoredGroups

WAITING_CHECK_S = 1.0  # least time between two looks at the deadline of a group that waits for servers
NOTHING: Mapping[int, EpisodeTask] = MappingProxyType({})


@dataclass(slots=True)
class OpenGroup:
    """One open group and how far it is."""

    plan: GroupPlan
    deadline_unix_s: float
    settled: dict[int, Outcome] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # of members that went out again
    published: set[int] = field(default_factory=set)
    closing: bool = False  # its close was decided

    @property
    def num_valid(self) -> int:
        """Settled members that may be learnt from."""
        return sum(outcome.is_valid for outcome in self.settled.values())

    @property
    def now(self) -> GroupPlan:
        """The plan with what has settled."""
        return msgspec.structs.replace(self.plan, settled=dict(self.settled))

    @property
    def unsettled(self) -> tuple[int, ...]:
        """Members that have not ended."""
        return tuple(member for member in range(len(self.plan.tasks)) if member not in self.settled)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Members that were published and have not ended."""
        return tuple(sorted(self.published - self.settled.keys()))

    @property
    def num_waiting(self) -> int:
        """Members that wait for their first server."""
        return len(self.plan.tasks) - len(self.published | self.settled.keys())

    def episode(self, member: int, lease: Lease, room_wait_s: float) -> EpisodeTask:
        """The task of a member, with its first server and the seconds in which there was none."""
        plan = msgspec.structs.replace(self.plan, deadline_unix_s=self.deadline_unix_s)
        task = plan.episode(member, self.attempts.get(member, 0))
        return msgspec.structs.replace(task, lease=lease, room_wait_s=room_wait_s)


class GroupBook:
    """All open groups of both phases."""

    def __init__(self) -> None:
        self._open: dict[str, OpenGroup] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._num_open: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._num_unsettled: dict[Phase, int] = dict.fromkeys(PHASES, 0)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._open

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._open.values())

    def num_open(self, phase: Phase) -> int:
        """Open groups of a phase."""
        return self._num_open[phase]

    def num_unsettled(self, phase: Phase) -> int:
        """Published episodes of a phase that have not ended."""
        return self._num_unsettled[phase]

    @property
    def num_waiting(self) -> int:
        """Episodes of all groups that wait for their first server."""
        return sum(group.num_waiting for group in self._open.values())

    def add(self, plan: GroupPlan, queued: Mapping[int, EpisodeTask] = NOTHING) -> OpenGroup | None:
        """A group was decided on, or found open after a restart; None for a known one, which stays.

        `queued`: tasks that the work queue holds, by member.
        """
        if plan.group_id in self._open:
            return None
        deadline_s = max((task.deadline_unix_s for task in queued.values()), default=0.0)
        deadline_s = max(deadline_s, plan.deadline_unix_s)
        group = OpenGroup(
            plan, deadline_s, dict(plan.settled), dict(enumerate(plan.attempts)), set(queued)
        )
        self._open[plan.group_id] = group
        self._num_open[plan.phase] += 1
        self._num_unsettled[plan.phase] += len(group.outstanding)
        heapq.heappush(self._deadlines, (deadline_s, plan.group_id))
        return group

    def publish(self, episode_id: str, now_s: float) -> tuple[OpenGroup, int] | None:
        """A member got its first server; None if it may no longer be played."""
        group_id, _, number = episode_id.rpartition(".")
        group, member = self._open.get(group_id), int(number)
        if group is None or group.closing or member in group.settled:
            return None
        if member not in group.published:
            group.published.add(member)
            self._num_unsettled[group.plan.phase] += 1
        group.deadline_unix_s = max(group.deadline_unix_s, now_s + group.plan.timeout_s)
        return group, member

    def postpone(self, group_id: str, deadline_unix_s: float) -> None:
        """Move the deadline of an open group, never forward."""
        group = self._open.get(group_id)
        if group is not None:
            group.deadline_unix_s = max(group.deadline_unix_s, deadline_unix_s)

    def settle(self, event: EpisodeSettled) -> None:
        """A member ended; repeated news and news of closed groups change nothing."""
        group = self._open.get(event.group_id)
        if group is not None and event.member not in group.settled:
            group.settled[event.member] = event.outcome
            self._num_unsettled[group.plan.phase] -= event.member in group.published

    def redeliver(self, event: EpisodeRedelivered) -> None:
        """A member went out again."""
        group_id, _, member = event.episode_id.rpartition(".")
        group = self._open.get(group_id)
        if group is not None:
            group.attempts[int(member)] = event.attempt

    def close(self, group_id: str) -> OpenGroup | None:
        """A group closed; returns what was known of it."""
        group = self._open.pop(group_id, None)
        if group is not None:
            self._num_open[group.plan.phase] -= 1
            self._num_unsettled[group.plan.phase] -= len(group.outstanding)
        return group

    def due(self, now_s: float) -> list[SettleMembers]:
        """Closes of all groups whose deadline has passed, each decided once."""
        decided = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, group_id = heapq.heappop(self._deadlines)
            group = self._open.get(group_id)
            if group is None or group.closing:
                continue
            if group.num_waiting:  # its time begins when the last of it has a server
                group.deadline_unix_s = now_s + max(group.plan.timeout_s, WAITING_CHECK_S)
            if group.deadline_unix_s > now_s:
                heapq.heappush(self._deadlines, (group.deadline_unix_s, group_id))
                continue
            group.closing = True
            decided.append(_close_at_deadline(group))
        return decided

    def close_early(
        self, decided: Iterable[SettleMembers | DeferGroups | ProbeServer]
    ) -> list[SettleMembers | DeferGroups | ProbeServer]:
        """Decisions that still hold; a group of which they end all members is closing from now on."""
        kept = []
        for one in decided:
            group = self._open.get(one.group_id) if isinstance(one, SettleMembers) else None
            if group is not None and group.closing:
                continue
            if group is not None and isinstance(one, SettleMembers):
                group.closing = set(one.members) >= set(group.unsettled)
            kept.append(one)
        return kept

    def cancel(
        self, phase: Phase, reason: str, chosen: Callable[[str], bool] = lambda group_id: True
    ) -> list[SettleMembers]:
        """Closes of the chosen groups of a phase that are not closing already."""
        decided = []
        for group_id, group in self._open.items():
            if group.plan.phase == phase and not group.closing and chosen(group_id):
                group.closing = True
                decided.append(SettleMembers(group_id, group.unsettled, Outcome.CANCELLED, reason))
        return decided


def _close_at_deadline(group: OpenGroup) -> SettleMembers:
    num_valid, num_members = group.num_valid, len(group.plan.tasks)
    enough = group.plan.phase == "train" and num_valid >= group.plan.min_valid
    settled = f"{num_valid} of {num_members} members valid at the group's deadline"
    return SettleMembers(
        group.plan.group_id,
        group.unsettled,
        Outcome.CANCELLED if enough else Outcome.TIMEOUT,
        f"closed without it: {settled}" if enough else f"too late: {settled}",
    )


class Reconciler:
    """Finds lost episodes: published, unsettled, not in the work queue, and not at a live worker.

    The work queue keeps a message until its episode has settled, so it holds what is queued or played.
    An episode counts as lost when it is missing in two comparisons in a row; what was published between
    them is left alone. It goes out again as a new attempt, or settles as `infra_failure` after
    `max_attempts`.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._missing: frozenset[str] = frozenset()

    def balanced(self) -> None:
        """The queue holds as many messages as there are unsettled episodes: nothing is missing."""
        self._missing = frozenset()

    def compare(
        self,
        groups: Iterable[OpenGroup],
        queued: Collection[str],
        is_held: Callable[[str], bool],
    ) -> list[Republish | SettleMembers]:
        """Decisions on episodes missing for the second time; `queued` are the queue's episode ids."""
        decided: list[Republish | SettleMembers] = []
        missing: set[str] = set()
        for group in groups:
            for member in group.outstanding:
                episode_id = f"{group.plan.group_id}.{member}"
                if group.closing or episode_id in queued or is_held(episode_id):
                    continue
                missing.add(episode_id)
                if episode_id in self._missing:
                    decided.append(self._decide(group, member))
        self._missing = frozenset(missing)
        return decided

    def _decide(self, group: OpenGroup, member: int) -> Republish | SettleMembers:
        if group.attempts.get(member, 0) + 1 < self._max_attempts:
            plan = msgspec.structs.replace(group.plan, deadline_unix_s=group.deadline_unix_s)
            return Republish(plan, member, "the work queue no longer held it")
        reason = f"lost by the work queue or dead-lettered in {self._max_attempts} attempts"
        return SettleMembers(group.plan.group_id, (member,), Outcome.INFRA_FAILURE, reason)


class StoreAudit:
    """Finds groups of which the store knows something else than we do: one of us has lost writes.

    A Redis that is started again after a power failure, or another one that takes over, may lack its
    last ones, and so may the log that a new scheduler replays.
    What differs in two comparisons in a row is lost: all events before the first one are known to us
    at the second.
    """

    def __init__(self) -> None:
        self._differing: frozenset[str] = frozenset()

    def compare(
        self, book: GroupBook, waiting: Collection[str], stored: StoredGroups
    ) -> list[ForgetGroup | SettleMembers]:
        """Decisions on groups that differ for the second time; `waiting` wait for the learner."""
        found: dict[str, ForgetGroup | SettleMembers] = {
            group_id: ForgetGroup(group_id, is_sent=True)
            for group_id in waiting
            if group_id not in stored.sent_ids
        }
        for group_id in stored.open_ids:
            if group_id not in book:
                found[group_id] = ForgetGroup(group_id)
        for group in book:
            group_id, phase, num_members = group.plan.group_id, group.plan.phase, len(group.plan.tasks)
            if group_id not in stored.open_ids:
                found[group_id] = ForgetGroup(group_id, phase, num_members)
            elif not group.unsettled:
                reason = "Redis has lost its trajectory"
                members = tuple(range(num_members))
                found[group_id] = SettleMembers(group_id, members, Outcome.INFRA_FAILURE, reason)
        decided = [one for group_id, one in found.items() if group_id in self._differing]
        self._differing = frozenset(found)
        return decided
