"""Admission of training groups by credit, and the bound that withholds it.

Credit: `trained + held + promised <= (max_staleness + served_step + 1) * groups_per_step`. Held are
the groups that run, wait for the learner or are at it; promised are those of an `AdmitGroups` that are
not open yet. The served step is that of the oldest weights among the servers: a group that began with
them after the learner's next step would be too old when its turn to be trained comes. The credit never
exceeds the last step's need. The buffer's bounds count running groups too, since each of them will wait
for the learner.
"""

import sys
from collections.abc import Collection, Iterable, Sequence

from tailrace_protos.subjects import Phase
from tailrace_scheduler.core.health import ServingState
from tailrace_scheduler.core.streams.decisions import AdmitGroups
from tailrace_scheduler.core.streams.events import AdmissionBounded
from tailrace_scheduler.core.streams.records import StreamServer
from tailrace_scheduler.core.streams.settings import StreamSettings

CREDIT = "credit"
BUFFER = "buffer"
SERVERS = "servers"
WEIGHTS = "weights"
EVALUATION = "evaluation"
REASONS = (CREDIT, BUFFER, SERVERS, WEIGHTS, EVALUATION)
SIZE_NEW = 0.1  # weight of the newest group in the expected size


class StalenessCredit:
    """Account of the groups between admission and the step that trains them.

    Nothing is admitted before the first `AdmissionBounded`.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self.is_changed = True
        """Something happened since the last decision that may allow or withhold admission."""
        self._step = 0
        self._last_step = 0  # nothing is admitted for later steps
        self._newest_policy_version = -1
        self._running: dict[str, int] = {}  # open groups -> members needed to train them
        self._waiting: dict[str, int] = {}  # closed, not trained -> bytes
        self._taken: list[str] = []  # of those, the ones that the learner has
        self._waiting_bytes = 0
        self._group_bytes = settings.group_bytes
        self._num_promised = 0
        self._told: AdmitGroups | None = None

    @property
    def num_running(self) -> int:
        """Open training groups."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Closed groups that no finished step has trained."""
        return len(self._waiting)

    # Events.

    def opened(self, group_id: str, phase: Phase, min_valid: int) -> None:
        """Take a new group; those of evaluations need no credit."""
        if phase == "train":
            self._running[group_id] = min_valid
            self._num_promised = max(self._num_promised - 1, 0)
            self.is_changed = True

    def complete(self, group_id: str, num_valid: int, num_bytes: int) -> None:
        """Let a group wait for the learner, or forget it where too few members are valid."""
        min_valid = self._running.pop(group_id, None)
        if min_valid is None:
            return
        self.is_changed = True
        if num_valid >= min_valid:
            self._waiting[group_id] = num_bytes
            self._waiting_bytes += num_bytes
            known = self._group_bytes or num_bytes
            self._group_bytes = known + SIZE_NEW * (num_bytes - known)

    def taken(self, group_ids: Iterable[str]) -> None:
        """Note the groups that the learner has; the next step trains them."""
        self._taken += [one for one in group_ids if one in self._waiting and one not in self._taken]

    def dropped(self, group_ids: Collection[str]) -> None:
        """Forget groups that no step will train."""
        for group_id in group_ids:
            self._running.pop(group_id, None)
            self._waiting_bytes -= self._waiting.pop(group_id, 0)
        self._taken = [one for one in self._taken if one not in group_ids]
        self.is_changed = True

    def stepped(self, optimizer_step: int) -> None:
        """Count the taken groups as trained."""
        self._step = optimizer_step
        self.dropped(tuple(self._taken))

    def bounded(self, event: AdmissionBounded) -> None:
        """Take the bounds that others set."""
        self._last_step = event.last_step
        self._newest_policy_version = event.newest_policy_version
        self.is_changed = True

    def served_step(self, server: StreamServer) -> int:
        """Return the step of the weights that a server has, at most the learner's own."""
        num_behind = self._newest_policy_version - server.policy_version  # every step is a version
        return max(self._step - max(num_behind, 0), 0)

    # Decision.

    def admit(self, servers: Iterable[StreamServer]) -> AdmitGroups | None:
        """Return the groups to admit, or the new reason for none; None if nothing changed."""
        if not self.is_changed:
            return None
        self.is_changed = False
        decided = self._decide([one for one in servers if not (one.gone or one.leaving)])
        if not decided.num_groups and decided == self._told:
            return None
        self._told = decided
        self._num_promised += decided.num_groups
        return decided

    def _decide(self, servers: Sequence[StreamServer]) -> AdmitGroups:
        if not servers:
            return AdmitGroups(0, SERVERS)
        oldest = min(one.policy_version for one in servers)
        state = ServingState(len(servers), oldest, self._newest_policy_version)
        if self._settings.max_staleness == 0 and not state.is_current:
            return AdmitGroups(0, WEIGHTS)
        usable = [one for one in servers if one.is_usable] or servers
        served_step = min(map(self.served_step, usable))
        credit = self._credit(served_step)
        if credit <= 0:
            return AdmitGroups(0, self._reason(served_step))
        room = self._room()
        return AdmitGroups(min(credit, room), "") if room > 0 else AdmitGroups(0, BUFFER)

    @property
    def _num_coming(self) -> int:
        return len(self._running) + self._num_promised

    def _reason(self, served_step: int) -> str:
        if self._last_step <= self._step:
            return EVALUATION
        return WEIGHTS if served_step < self._step else CREDIT

    def _credit(self, served_step: int) -> int:
        settings = self._settings
        last_step = min(settings.max_staleness + served_step + 1, self._last_step, settings.max_steps)
        held = len(self._waiting) + self._num_coming
        return (last_step - self._step) * settings.groups_per_step - held

    def _room(self) -> int:
        settings, held = self._settings, len(self._waiting) + self._num_coming
        by_groups = (settings.max_buffered_groups or sys.maxsize) - held
        expected = self._waiting_bytes + self._num_coming * self._group_bytes
        free_bytes = settings.max_buffered_bytes - expected
        by_bytes = int(free_bytes // max(self._group_bytes, 1.0))
        needed = settings.groups_per_step - held  # fewer would leave the learner waiting for ever
        return min(by_groups, max(by_bytes, needed))
