"""Age of a token: optimizer steps between the weights that sampled it and the learner's.

A lineage is the work of one learner process from a starting point; its name begins with the step it
started at. After a resume from step r the weights of other lineages beyond their fork are not on the
surviving path. A token of such weights is as old as the fork, the last weights that both paths share.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

UNKNOWN = np.iinfo(np.int64).min // 2  # step of a version without a record: older than all
_MAX_VERSIONS = 8192  # in memory


class Ancestor(msgspec.Struct, frozen=True):
    """A lineage on the surviving path, up to and including `last_step`."""

    lineage: str
    last_step: int


def new_lineage(start_step: int) -> str:
    """Makes a name that no other learner uses."""
    return f"{start_step}-{secrets.token_hex(4)}"


def start_of(lineage: str) -> int:
    """Step at which a lineage started."""
    return int(lineage.partition("-")[0])


def newest_versions(book: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """The book of versions without its oldest half, if it has grown beyond what tokens are of."""
    if len(book) <= _MAX_VERSIONS:
        return book
    return {version: book[version] for version in sorted(book)[-_MAX_VERSIONS // 2 :]}


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The current lineage and those it comes from."""

    current: str
    ancestors: tuple[Ancestor, ...] = ()

    def resumed(self, step: int) -> "Ancestry":
        """Ancestry of a new lineage that starts at `step` of this one."""
        return Ancestry(new_lineage(step), (*self.ancestors, Ancestor(self.current, step)))

    def surviving_step(self, lineage: str, step: int) -> int:
        """Newest step on the surviving path that the weights of (lineage, step) contain."""
        if lineage == self.current:
            return step
        bounds = {ancestor.lineage: ancestor.last_step for ancestor in self.ancestors}
        fork = bounds.get(lineage, min(start_of(lineage), start_of(self.current)))
        return min(step, fork)

    def ages(
        self, versions: NDArray[np.int64], step: int, book: Mapping[int, tuple[str, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Age of each version [T] in steps for a learner that has done `step` steps, and flags [T].

        A flag says that the version's weights are those that the learner had then, and not of a path
        that was given up. Versions missing in `known_versions` are older than all.
        """
        distinct, inverse = np.unique(versions, return_inverse=True)
        steps = np.full(len(distinct), UNKNOWN, dtype=np.int64)
        own = np.zeros(len(distinct), dtype=np.bool_)
        for index, version in enumerate(distinct.tolist()):
            if version in book:
                steps[index] = self.surviving_step(*book[version])
                own[index] = steps[index] == book[version][1] <= step
        return np.maximum(step - steps, 0)[inverse], own[inverse]
