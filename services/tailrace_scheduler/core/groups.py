"""The groups that are open: recorded, and not all members settled.

Every group closes: when its last member settles, or at its deadline, which moves while an agent outside
of the cluster has still to lease one of its episodes. What has not settled then is
`cancelled` where the group has enough valid members without it, and a `timeout` where it has not.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeRedelivered, EpisodeSettled
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.core.decisions import Republish, SettleMembers
from tailrace_scheduler.ports import GroupPlan


@dataclass(slots=True)
class OpenGroup:
    """One open group and how far it is."""

    plan: GroupPlan
    deadline_unix_s: float
    settled: dict[int, Outcome] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # of members that went out again
    closing: bool = False  # its close was decided

    @property
    def num_valid(self) -> int:
        """Settled members that may be learnt from."""
        return sum(outcome.is_valid for outcome in self.settled.values())

    @property
    def unsettled(self) -> tuple[int, ...]:
        """Members that have not ended."""
        return tuple(member for member in range(len(self.plan.tasks)) if member not in self.settled)


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
        """Episodes of a phase that have not ended."""
        return self._num_unsettled[phase]

    def add(self, plan: GroupPlan) -> bool:
        """A group was decided on, or found open after a restart; False for a known one, which stays."""
        if plan.group_id in self._open:
            return False
        deadline_s = plan.deadline_unix_s
        group = OpenGroup(plan, deadline_s, dict(plan.settled), dict(enumerate(plan.attempts)))
        self._open[plan.group_id] = group
        self._num_open[plan.phase] += 1
        self._num_unsettled[plan.phase] += len(group.unsettled)
        heapq.heappush(self._deadlines, (deadline_s, plan.group_id))
        return True

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
            self._num_unsettled[group.plan.phase] -= 1

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
            self._num_unsettled[group.plan.phase] -= len(group.unsettled)
        return group

    def due(self, now_s: float) -> list[SettleMembers]:
        """Closes of all groups whose deadline has passed, each decided once."""
        decided = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, group_id = heapq.heappop(self._deadlines)
            group = self._open.get(group_id)
            if group is None or group.closing:
                continue
            if group.deadline_unix_s > now_s:
                heapq.heappush(self._deadlines, (group.deadline_unix_s, group_id))
                continue
            group.closing = True
            decided.append(_close_at_deadline(group))
        return decided

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
    """Finds lost episodes: unsettled, not in the work queue, and not at a live worker.

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
            for member in group.unsettled:
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
            return Republish(group.plan, member, "the work queue no longer held it")
        reason = f"lost by the work queue or dead-lettered in {self._max_attempts} attempts"
        return SettleMembers(group.plan.group_id, (member,), Outcome.INFRA_FAILURE, reason)
