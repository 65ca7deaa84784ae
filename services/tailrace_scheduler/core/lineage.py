"""Progress of the surviving lineage of weights, and the groups that its learner has still to train.

A learner that resumes at step s begins a lineage. Steps of other lineages no longer count; groups they
trained after s, unless a checkpoint released them, wait for the learner again. Every event may come
twice and after a restart: the same events in the same order give the same state.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tailrace_protos.event import (
    CheckpointSaved,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    StepFinished,
    WeightsPublished,
)

NO_SIZES: Mapping[str, int] = MappingProxyType({})


class WaitingGroups(NamedTuple):
    """Groups that wait for the learner."""

    sizes: Mapping[str, int] = NO_SIZES  # in bytes, by id
    mean_bytes: float = 0.0  # 0: not known


NONE_WAITING = WaitingGroups()


class Lineage:
    """The learner's progress as the events tell it."""

    def __init__(self) -> None:
        self.name = ""  # empty before the first LearnerResumed
        self.step = 0
        self.checkpoint_step = -1  # newest durable checkpoint of this lineage
        self.next_group_index = 0  # where the data order goes on if Redis knows nothing
        self._num_sent = 0  # groups sent to the learner so far, over all lineages
        self._sent_bytes = 0
        self._ready: dict[str, int] = {}  # group id -> bytes
        self._trained: dict[str, tuple[int, int]] = {}  # group id -> (step, bytes); not in a checkpoint
        self._versions: dict[tuple[str, int], int] = {}  # (lineage, step) -> policy version
        self._newest: tuple[str, int] = ("", -1)  # lineage that published last, its highest version

    @property
    def started(self) -> bool:
        """Tell whether a learner has begun."""
        return self.name != ""

    @property
    def policy_version(self) -> int:
        """Version of this lineage's current step; -1 until it is published."""
        return self._versions.get((self.name, self.step), -1)

    def version_of(self, step: int) -> int:
        """Version of a step's weights, or of the current step's where this lineage did not make it."""
        return self._versions.get((self.name, step), self.policy_version)

    @property
    def newest_version(self) -> int:
        """Highest version of the lineage that published last; on new servers they begin anew."""
        return self._newest[1]

    @property
    def num_ready(self) -> int:
        """Groups sent to the learner that no finished step of this lineage has used."""
        return len(self._ready)

    @property
    def waiting(self) -> WaitingGroups:
        """Those groups, and the size of an average one of all that were sent so far."""
        mean_bytes = self._sent_bytes / self._num_sent if self._num_sent else 0.0
        return WaitingGroups(dict(self._ready), mean_bytes)

    def resumed(self, event: LearnerResumed) -> None:
        """A learner begins at `event.step`: what was trained after it has not happened."""
        self.name = event.lineage
        self.step = event.step
        self.next_group_index = event.next_group_index
        self.checkpoint_step = event.step if event.checkpoint else -1
        lost = {group: size for group, (step, size) in self._trained.items() if step > event.step}
        self._trained = {group: at for group, at in self._trained.items() if group not in lost}
        self._ready = {**lost, **self._ready}

    def closed(self, event: GroupClosed) -> None:
        """A group closed; if it was sent to the learner, it waits there now."""
        if event.sent_to_learner and event.group_id not in self._ready:
            self._ready[event.group_id] = event.num_bytes
            self._num_sent += 1
            self._sent_bytes += event.num_bytes

    def dropped(self, event: GroupDropped) -> None:
        """A group will not be trained; its credit is free again."""
        self._ready.pop(event.group_id, None)
        self._trained.pop(event.group_id, None)

    def stepped(self, event: StepFinished) -> bool:
        """An optimizer step was made; False if it belongs to a lineage that did not survive."""
        if event.lineage != self.name:
            return False
        self.step = event.step
        self._publish(event.lineage, event.step, event.policy_version)
        for group_id in event.group_ids:
            num_bytes = self._ready.pop(group_id, 0)
            self._trained[group_id] = (event.step, num_bytes)
        return True

    def published(self, event: WeightsPublished) -> None:
        """A version is available; the same step may be published again under a new one."""
        self._publish(event.lineage, event.optimizer_step, event.policy_version)

    def saved(self, event: CheckpointSaved) -> bool:
        """A checkpoint holds all groups trained up to its step; they are gone from the buffer."""
        if event.lineage != self.name:
            return False
        self.checkpoint_step = max(self.checkpoint_step, event.step)
        self._trained = {group: at for group, at in self._trained.items() if at[0] > event.step}
        return True

    def forget(self) -> None:
        """Redis is a new one: no group waits in it, and a learner has yet to resume."""
        self.name = ""
        self._ready.clear()
        self._trained.clear()

    def _publish(self, lineage: str, step: int, policy_version: int) -> None:
        if policy_version < 0:
            return
        self._versions[lineage, step] = max(policy_version, self._versions.get((lineage, step), -1))
        if lineage == self.name:
            newest = self._newest[1] if self._newest[0] == lineage else -1
            self._newest = (lineage, max(newest, policy_version))
        if len(self._versions) > 64:
            del self._versions[next(iter(self._versions))]
