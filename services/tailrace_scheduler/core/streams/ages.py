"""Groups by age, and the ones that the learner may take (rule E).

The age of a group is the number of optimizer steps since its oldest unmasked token. The learner takes
closed groups by age, the oldest first. Under `wait`, `close` and `auto` a group that reaches
`max_staleness` is trained in that step, and the learner waits for it.
"""

from tailrace_scheduler.core.streams.records import StreamGroup
from tailrace_scheduler.core.streams.settings import StreamSettings


class Ages:
    """Sampled training groups that no finished step has trained."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self.step = 0
        self._by_version: dict[int, dict[str, StreamGroup]] = {}
        self._begun: dict[str, StreamGroup] = {}  # since the last step, with its weights or older ones
        self._ready: dict[str, StreamGroup] = {}  # in closing order
        self.blocked_slots = 0  # slots of the step that `select` could not fill; 0: not blocked

    @property
    def num_ready(self) -> int:
        """Groups that wait for the learner."""
        return len(self._ready)

    def sampled(self, group: StreamGroup, version: int) -> None:
        """Set the oldest version of a group (its first start, or told after a restart)."""
        if group.version < 0:
            self._begun[group.group_id] = group
        self.forget(group)
        group.version = version
        self._by_version.setdefault(version, {})[group.group_id] = group

    def forget(self, group: StreamGroup) -> None:
        """Take a group out, since it was taken, dropped or is invalid."""
        self._ready.pop(group.group_id, None)
        same = self._by_version.get(group.version)
        if same is not None:
            same.pop(group.group_id, None)
            if not same:
                del self._by_version[group.version]

    def ready(self, group: StreamGroup) -> None:
        """A group closed and may be trained."""
        self._ready[group.group_id] = group
        if group.version < 0:
            self.sampled(group, self.step)
            self._ready[group.group_id] = group

    def next_step(self, step: int, now_s: float) -> None:
        """A step finished."""
        for group in {**self._by_version.get(self.step, {}), **self._begun}.values():
            live = group.live.values()
            group.old_tokens = group.done_tokens + sum(one.sampled_by(now_s) for one in live)
        self._begun.clear()
        self.step, self.blocked_slots = step, 0

    def due(self, is_open: bool) -> list[StreamGroup]:
        """Return groups of age S and more, the oldest first: those that run, or those that closed."""
        oldest = self.step - self._settings.max_staleness
        versions = sorted(one for one in self._by_version if one <= oldest)
        return [
            group
            for version in versions
            for group in self._by_version[version].values()
            if (group.state == "open") is is_open
        ]

    def select(self, slots_left: int) -> list[StreamGroup]:
        """Return the groups that the learner may take now (rule E)."""
        if slots_left <= 0:
            return []
        found = sorted(self._ready.values(), key=lambda one: (one.version, one.seq))
        if self._settings.policy not in ("mask", "drop"):
            must, num_old = len(self.due(is_open=True)), len(self.due(is_open=False))
            # The last `must` slots of the step stay free for groups that have to be trained in it.
            found = found[: max(slots_left - must, num_old)]
        self.blocked_slots = 0 if found else slots_left
        return found[:slots_left]

    def overdue(self) -> list[StreamGroup]:
        """Return groups too old to be trained, for policy `drop`."""
        oldest = self.step - self._settings.max_staleness
        return [
            group
            for version in [one for one in self._by_version if one < oldest]
            for group in self._by_version[version].values()
        ]
