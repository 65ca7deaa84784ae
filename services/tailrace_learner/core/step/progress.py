"""Progress of the run: its state, the groups that no checkpoint holds yet, the times of a step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tailrace.config import RunConfig
from tailrace_learner.core.algorithms.metrics import Metrics
from tailrace_learner.core.step.run_state import RunState, recent_ids
from tailrace_protos.event import CheckpointSaved, StepFinished


@dataclass(slots=True)
class Timing:
    """Wall time of one step by use."""

    began_s: float  # end of the step before
    wait_s: float = 0.0  # for groups
    busy_s: float = 0.0  # computing
    first_pass_unix_s: float = 0.0  # 0 before the first backward


@dataclass(slots=True)
class _Held:
    """Groups trained since the last checkpoint."""

    entry_ids: list[str] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, entry_id: str, group_id: str, num_bytes: int) -> None:
        """Adds a group."""
        self.entry_ids.append(entry_id)
        self.group_ids.append(group_id)
        self.num_bytes += num_bytes

    def without_last(self, last: "_Held") -> "_Held":
        """These groups without the last ones."""
        size = len(self.entry_ids) - len(last.entry_ids)
        return _Held(self.entry_ids[:size], self.group_ids[:size], self.num_bytes - last.num_bytes)

    def with_later(self, later: "_Held") -> "_Held":
        """These groups and those trained after them."""
        return _Held(
            self.entry_ids + later.entry_ids,
            self.group_ids + later.group_ids,
            self.num_bytes + later.num_bytes,
        )


class Progress:
    """State of the run, for the rank that trains; no I/O, no clock."""

    def __init__(self, state: RunState, run: RunConfig, max_retained_bytes: int) -> None:
        self.state = state
        self.is_save_overdue = False  # writing the last checkpoint failed
        self._run = run
        self._max_retained_bytes = max_retained_bytes
        self._held = _Held()
        self._saving = _Held()
        self._of_step = _Held()  # groups of `_held` that belong to the step in progress
        self._first_index = state.next_group_index  # at the begin of the step

    @property
    def retained_bytes(self) -> int:
        """Size of the groups that no durable checkpoint holds."""
        return self._held.num_bytes + self._saving.num_bytes

    @property
    def is_finished(self) -> bool:
        """True if all steps are done."""
        return self.state.step >= self._run.max_steps

    @property
    def is_save_due(self) -> bool:
        """True if a checkpoint must follow the step just done."""
        is_regular = self._run.save_steps > 0 and self.state.step % self._run.save_steps == 0
        is_full = self._held.num_bytes >= self._max_retained_bytes
        return self.is_finished or is_regular or is_full or self.is_save_overdue

    @property
    def has_unsaved_steps(self) -> bool:
        """True if steps were done since the last checkpoint was begun."""
        return bool(self._held.entry_ids) or self.is_save_overdue

    def begin_step(self) -> None:
        """Notes that a step begins: no group is its own yet."""
        self._of_step, self._first_index = _Held(), self.state.next_group_index

    def abandon_step(self) -> None:
        """Returns to the begin of the step: its groups are not trained, and stay in the buffer."""
        self._held = self._held.without_last(self._of_step)
        self.state = msgspec.structs.replace(self.state, next_group_index=self._first_index)
        self.begin_step()

    def saw(self, group_index: int) -> None:
        """Moves the data order beyond a group that was taken, even if it is not trained."""
        beyond = max(self.state.next_group_index, group_index + 1)
        self.state = msgspec.structs.replace(self.state, next_group_index=beyond)

    def hold(self, entry_id: str, group_id: str, num_bytes: int) -> None:
        """Adds a group to the current step."""
        self._held.add(entry_id, group_id, num_bytes)
        self._of_step.add(entry_id, group_id, num_bytes)

    def holds(self, entry_id: str) -> bool:
        """True if a group was taken for this step, or is in the weights."""
        held, saving, older = self._held, self._saving, self.state.older_entry_ids
        return entry_id in held.entry_ids or entry_id in saving.entry_ids or entry_id in older

    def step_done(self, timing: Timing, now_s: float, numbers: Metrics) -> None:
        """Counts the step, and adds its times to its metrics."""
        wall_s = max(now_s - timing.began_s, 1e-9)
        numbers["learner_wait_s"] = timing.wait_s
        numbers["learner_busy_s"] = timing.busy_s
        numbers["tokens_per_s"] = (numbers["num_row_tokens"] or 0.0) / wall_s
        self.state = msgspec.structs.replace(
            self.state,
            step=self.state.step + 1,
            num_trained_groups=self.state.num_trained_groups + self._run.groups_per_step,
            kl_coef=numbers.get("kl_coef"),
        )

    def quarantined(self, quarantine: Mapping[str, int]) -> None:
        """Keeps the sources whose tokens are not trained: groups after a resume may hold some."""
        self.state = msgspec.structs.replace(self.state, quarantine=dict(quarantine))

    def published(self, policy_version: int) -> None:
        """Notes the version of the newest weights."""
        self.state = msgspec.structs.replace(self.state, policy_version=policy_version)

    def finished_event(
        self, timing: Timing, now: float, group_ids: Sequence[str], num_dropped: int, numbers: Metrics
    ) -> StepFinished:
        """Event of the step, still without its policy version, and from now on untold."""
        event = StepFinished(
            lineage=self.state.lineage,
            step=self.state.step,
            policy_version=-1,
            group_ids=tuple(group_ids),
            num_dropped_groups=num_dropped,
            started_unix_s=timing.first_pass_unix_s or now,
            finished_unix_s=now,
            metrics=numbers,
        )
        self.state = msgspec.structs.replace(self.state, untold_steps=(*self.state.untold_steps, event))
        return event

    def told(self, event: StepFinished) -> None:
        """Notes that the outbox has the event of a step."""
        untold = tuple(each for each in self.state.untold_steps if each.step != event.step)
        self.state = msgspec.structs.replace(self.state, untold_steps=untold)

    def saving(self, unix_s: float) -> RunState:
        """State for a checkpoint of this moment; later groups belong to the next one.

        Checkpoints are in the order of their times, so each is later than the one before, even if the
        clock was set back.
        """
        self._saving, self._held = self._saving.with_later(self._held), _Held()
        self.is_save_overdue = False
        later_unix_s = max(unix_s, math.nextafter(self.state.saved_unix_s, math.inf))
        self.state = msgspec.structs.replace(self.state, saved_unix_s=later_unix_s)
        return msgspec.structs.replace(
            self.state,
            entry_ids=tuple(self._saving.entry_ids),
            group_ids=tuple(self._saving.group_ids),
        )

    def saved(self) -> None:
        """Notes that the checkpoint is durable and holds the groups that it was begun with."""
        newest, self._saving = self._saving.entry_ids, _Held()
        older = recent_ids((*self.state.older_entry_ids, *newest), len(newest))
        self.state = msgspec.structs.replace(self.state, older_entry_ids=older)

    def not_saved(self) -> None:
        """Notes that the disk did not take the checkpoint: its groups wait for the next one."""
        self._held, self._saving = self._saving.with_later(self._held), _Held()
        self.is_save_overdue = True


def name_of(event: StepFinished) -> str:
    """Name under which the outbox takes the event of a step once."""
    return f"step_finished:{event.lineage}:{event.step}"


def saved_event(state: RunState, path: str) -> CheckpointSaved:
    """Event of a checkpoint; the same from its writer and from a learner that resumes from it."""
    return CheckpointSaved(
        lineage=state.lineage, step=state.step, path=path, num_groups=len(state.group_ids)
    )
