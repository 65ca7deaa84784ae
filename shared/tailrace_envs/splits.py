"""Splits of generated tasks.

A hash of a task's text decides its split, in every process and for every seed and order. A held-out
task is therefore never a train task. Each environment says which texts make two tasks the same.
"""

import hashlib
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "held_out", "all"]


GridT = TypeVar("GridT", NDArray[np.bool_], NDArray[np.uint8])


def images_of(pattern: GridT) -> list[GridT]:
    """The eight mirror images and rotations of a grid, the grid itself first."""
    return [np.rot90(side, turns) for side in (pattern, pattern.T) for turns in range(4)]


def symmetric_text(pattern: GridT) -> str:
    """Text of a grid that is the same for all its images, and for no other grid."""
    return min(f"{len(image)} {image.tobytes().hex()}" for image in images_of(pattern))


def is_held_out(text: str, share: float = 0.5) -> bool:
    """True for a share of all tasks."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
