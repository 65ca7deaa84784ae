"""Run state in a checkpoint: enough to keep the data order and to train nothing twice."""

from __future__ import annotations

import msgspec

from tailrace_learner.core.batch.lineage import Ancestor, Ancestry, new_lineage

SCHEMA = 1


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
    policy_version: int = -1  # newest one published
    saved_unix_s: float = 0.0
    config_digest: str = ""
    reference: ReferenceState | None = None  # of a run that has one
    kl_coef: float | None = None  # as steered so far
    quarantine: dict[str, int] = {}  # source of wrong tokens -> step of its last good reading

    @property
    def ancestry(self) -> Ancestry:
        """Lineage that wrote the checkpoint, and the lineages before it."""
        return Ancestry(self.lineage, self.ancestors)


def first_state() -> RunState:
    """State of a run that begins."""
    return RunState(step=0, lineage=new_lineage(0))


def resumed_state(saved: RunState, config_digest: str) -> RunState:
    """State of a new lineage that continues where `saved` ended."""
    ancestry = saved.ancestry.resumed(saved.step)
    return msgspec.structs.replace(
        saved,
        lineage=ancestry.current,
        ancestors=ancestry.ancestors,
        entry_ids=(),
        group_ids=(),
        config_digest=config_digest,
    )
