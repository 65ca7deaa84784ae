"""Reconciliation of lost episodes: unsettled, not in the work queue, and not at a live worker.

The work queue keeps a message until its episode has settled, so what it holds is what is queued or
being played. An episode counts as lost when it is missing in two comparisons in a row; what was
published between them is left alone. It goes out again as a new attempt, or settles as `infra_failure`
after `max_attempts`.
"""

from collections.abc import Callable, Collection, Iterable

from tailrace_protos.episode import Outcome
from tailrace_scheduler.core.decisions import Republish, SettleMembers
from tailrace_scheduler.core.groups import OpenGroup


class Reconciler:
    """Remembers what was missing in the last comparison."""

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
