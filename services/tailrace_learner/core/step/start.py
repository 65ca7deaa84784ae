"""Where a learner starts: from a checkpoint or anew."""

from __future__ import annotations

import enum


class Origin(enum.StrEnum):
    """What a starting learner continues."""

    NEW = "new"
    NAMED = "named"  # the checkpoint that the user names
    NEWEST = "newest"  # the newest of the run directory
    LIVE = "live"  # the newest of this run that Redis knows: this process was restarted


def origin(resume_from_checkpoint: bool | str, *, has_saved: bool) -> Origin:
    """Decide by the user's setting, unless the run is already going on.

    `has_saved`: there is a checkpoint by a lineage that Redis knows. Then a learner was here before,
    and only its own checkpoints continue what is in the buffer, whatever the user said at the run's
    beginning. A learner that died before it saved one is followed by another that starts where it did:
    the buffer still has all that it trained.
    """
    if has_saved:
        return Origin.LIVE
    if isinstance(resume_from_checkpoint, str):
        return Origin.NAMED
    return Origin.NEWEST if resume_from_checkpoint else Origin.NEW
