"""Start of a learner: from a checkpoint or anew."""

from __future__ import annotations

import enum


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
