"""Splits of generated tasks.

A hash of a task's text decides its split, in every process and for every seed and order. A held-out
task is therefore never a train task. Each environment says which texts make two tasks the same.
"""

import hashlib
import math
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "held_out", "all"]


GridT = TypeVar("GridT", NDArray[np.bool_], NDArray[np.uint8])


def images_of(pattern: GridT) -> list[GridT]:
    """The eight mirror images and rotations of grids, [..., rows, columns], themselves first."""
    sides = (pattern, pattern.swapaxes(-2, -1))
    return [np.rot90(side, turns, axes=(-2, -1)) for side in sides for turns in range(4)]


def symmetric_text(pattern: GridT) -> str:
    """Text of a grid that is the same for all its images, and for no other grid."""
    return symmetric_texts(pattern[np.newaxis])[0]


def symmetric_texts(patterns: GridT) -> list[str]:
    """`symmetric_text` of each grid, [grids, rows, columns]."""
    texts = [
        [f"{image.shape[-2]} {cells.hex()}" for cells in grids_as_bytes(image)]
        for image in images_of(patterns)
    ]
    return [min(each) for each in zip(*texts, strict=True)]


def grids_as_bytes(grids: GridT) -> list[bytes]:
    """The cells of each grid, [grids, ...], row by row."""
    num_bytes = math.prod(grids.shape[1:])
    cells = grids.tobytes()
    return [cells[begin : begin + num_bytes] for begin in range(0, len(cells), num_bytes)]


def is_held_out(text: str, share: float = 0.5) -> bool:
    """True for a share of all tasks."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
