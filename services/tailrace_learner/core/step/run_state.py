"""Run state in a checkpoint: enough to keep the data order and to train nothing twice."""

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tailrace_learner.core.batch.lineage import Ancestor, Ancestry, new_lineage
from tailrace_protos.event import StepFinished

SCHEMA = 1
_RESUME = "resume_from_checkpoint"  # differs in every resumed run
_ABSENT = object()
_NUM_NAMED_AGAIN = 4096  # their release takes Redis some milliseconds


class ReferenceState(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the reference model, by source and digest."""

    source: str  # directory, or name in the hub
    digest: str  # of all weights


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """`run_state.json`. The groups of `entry_ids` are in the weights and leave the buffer."""

    schema: int = SCHEMA
    step: int  # optimizer steps done
    lineage: str
    ancestors: tuple[Ancestor, ...] = ()
    next_group_index: int = 0  # beyond the highest index of any group trained or dropped
    num_trained_groups: int = 0  # on the path that leads here
    entry_ids: tuple[str, ...] = ()  # buffer entries trained since the checkpoint before
    group_ids: tuple[str, ...] = ()  # of these entries
    older_entry_ids: tuple[str, ...] = ()  # of checkpoints before: Redis may lose a release
    policy_version: int = -1  # newest one published
    saved_unix_s: float = 0.0
    experiment: dict[str, Any] = {}  # as the process that saved read it
    reference: ReferenceState | None = None  # of a run that has one
    kl_coef: float | None = None  # as steered so far
    quarantine: dict[str, int] = {}  # source of wrong tokens -> step of its last good reading
    untold_steps: tuple[StepFinished, ...] = ()  # done, but the learner was stopped before it told them

    @property
    def released_ids(self) -> tuple[str, ...]:
        """Entries that leave the buffer with this checkpoint, with those that left it before."""
        return (*self.older_entry_ids, *self.entry_ids)

    @property
    def ancestry(self) -> Ancestry:
        """Lineage that wrote the checkpoint, and the lineages before it."""
        return Ancestry(self.lineage, self.ancestors)


def first_state() -> RunState:
    """State of a run that begins."""
    return RunState(step=0, lineage=new_lineage(0))


def resumed_state(saved: RunState, experiment: Mapping[str, Any]) -> RunState:
    """State of a new lineage that continues where `saved` ended."""
    ancestry = saved.ancestry.resumed(saved.step)
    return msgspec.structs.replace(
        saved,
        lineage=ancestry.current,
        ancestors=ancestry.ancestors,
        entry_ids=(),
        group_ids=(),
        older_entry_ids=recent_ids(saved.released_ids, len(saved.entry_ids)),
        untold_steps=(),
        experiment=dict(experiment),
    )


def recent_ids(entry_ids: tuple[str, ...], num_newest: int) -> tuple[str, ...]:
    """Returns the last of `entry_ids`: as many as a checkpoint names again, `num_newest` at least.

    A Redis that loses power, or fails over, may lose its writes of the last seconds, and gives the
    groups of a checkpoint again.
    """
    return entry_ids[-max(num_newest, _NUM_NAMED_AGAIN) :]


def changed_keys(saved: RunState, experiment: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys with other values than in the experiment that saved; none if the checkpoint lacks it."""
    if not saved.experiment:
        return ()
    before, now = dict(_leaves(saved.experiment)), dict(_leaves(experiment))
    return tuple(
        key
        for key in sorted(before.keys() | now.keys())
        if key != _RESUME and before.get(key, _ABSENT) != now.get(key, _ABSENT)
    )


def _leaves(section: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key; lists and empty sections are values."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


class Origin(enum.StrEnum):
    """Start of a learner's weights."""

    NEW = "new"
    NAMED = "named"  # the checkpoint that the user names
    NEWEST = "newest"  # the newest of the run directory
    LIVE = "live"  # the newest of this run that Redis knows: this process was restarted


def origin(resume_from_checkpoint: bool | str, *, has_saved: bool) -> Origin:
    """Chooses by the user's setting, unless the run is already going on.

    `has_saved`: there is a checkpoint by a lineage that Redis knows. Then a learner ran before, and
    only its own checkpoints continue what is in the buffer, whatever the user's setting at the run's
    beginning. A learner that follows one without a checkpoint starts where that one did: the buffer
    still has all that it trained.
    """
    if has_saved:
        return Origin.LIVE
    if isinstance(resume_from_checkpoint, str):
        return Origin.NAMED
    return Origin.NEWEST if resume_from_checkpoint else Origin.NEW
