"""Trained groups as files, for audits and replay: one msgpack list of `TrajectoryGroup` per step.

`<run_dir>/trajectories/step_<N>-<lineage>.msgpack` holds the groups that made step N of that lineage.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tailrace.provenance import covers_trained_tokens
from tailrace_protos.base import decode, encode
from tailrace_protos.trajectory import TrajectoryGroup


class TrajectoryFiles:
    """Writes trajectory files; each is complete or absent."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "trajectories"

    def append(self, step: int, lineage: str, groups: Sequence[TrajectoryGroup]) -> Path:
        """Write the groups of a step; `OSError` if the disk refuses them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"step_{step:06d}-{lineage}.msgpack"
        part = target.with_suffix(".part")
        try:
            part.write_bytes(encode(list(groups)))
            os.replace(part, target)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return target


def read_groups(path: Path) -> list[TrajectoryGroup]:
    """Groups of a file; raises `ValueError` for a file whose rows lack the spans of their tokens."""
    groups = decode(path.read_bytes(), list[TrajectoryGroup])
    rows = (row for group in groups for member in group.members for row in member.rows)
    if not all(covers_trained_tokens(row) for row in rows):
        raise ValueError(
            f"{path}: rows without token spans: another version of Tailrace wrote this file; "
            "read it with that version"
        )
    return groups
