"""Random FrozenLake maps and their splits.

Maps are drawn as gymnasium's `generate_random_map` draws them: every cell is ice with probability p,
and a map without a path from S to G is drawn again. A hash of a map's holes, the same for its mirror
images and rotations, holds out one map of twelve. A map within one cell of a held-out map, or of a
mirror image or rotation of one, belongs to neither split. So no held-out map resembles a train map.

Drawing stops when `POOL_SIZE` maps are held out, or after `MAX_DRAWS` (4x4 with p = 0.8: 0.1 s, once
per process).
"""

import hashlib
import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_envs.splits import Split, grids_as_bytes, images_of, is_held_out, symmetric_texts

FrozenLakeMap = tuple[str, ...]  # one string per grid row, of S, F, H, G
Holes = NDArray[np.bool_]  # [size, size]

POOL_SIZE = 1024
MAX_DRAWS = 1 << 17
HELD_OUT_SHARE = 0.08
_CHUNK = 1 << 13


class MapPools(NamedTuple):
    """Distinct maps; `every` contains both splits and the maps of neither.

    They are in the order of drawing, in which maps with more holes come later. Those of `train` are in
    the order of their hashes, which mixes them: training plays them one after the other.
    """

    train: tuple[FrozenLakeMap, ...]
    held_out: tuple[FrozenLakeMap, ...]
    every: tuple[FrozenLakeMap, ...]


@cache
def map_pools(size: int, p: float) -> MapPools:
    """Draws the maps of all splits for a grid size and a probability of ice."""
    random = np.random.RandomState([0x1CE, size, round(p * 1e6)])
    drawn: dict[bytes, Holes] = {}
    met: set[bytes] = set()
    held_out: set[bytes] = set()
    for _ in range(MAX_DRAWS // _CHUNK):
        new = _new_patterns(_draw(size, p, random), met)
        maps = new[_has_path(~new)]
        texts = symmetric_texts(maps)
        for key, holes, text in zip(grids_as_bytes(maps), maps, texts, strict=True):
            drawn[key] = holes
            if is_held_out(f"lake {text}", HELD_OUT_SHARE):
                held_out.add(key)
        if len(held_out) >= POOL_SIZE:
            break
    near = _surroundings(_stacked([drawn[key] for key in held_out], size))
    named = dict(zip(drawn, _maps_of(_stacked([*drawn.values()], size)), strict=True))
    return MapPools(
        train=tuple(sorted((named[key] for key in drawn if key not in near), key=_digest)),
        held_out=tuple(named[key] for key in drawn if key in held_out),
        every=tuple(named.values()),
    )


def _digest(lake_map: FrozenLakeMap) -> bytes:
    return hashlib.blake2b(" ".join(lake_map).encode(), digest_size=8).digest()


def maps_of(size: int, p: float, split: Split) -> tuple[FrozenLakeMap, ...]:
    """Maps of one split; `ValueError` if the split is empty with these settings."""
    pools = map_pools(size, p)
    maps = pools.every if split == "all" else getattr(pools, split)
    if not maps:
        raise ValueError(
            f"size {size} with p {p} has no {split} map ({len(pools.every)} distinct maps in all): "
            "raise size, lower p or use split 'all'"
        )
    return tuple(maps)


def map_for_seed(size: int, p: float, split: Split, seed: int) -> FrozenLakeMap:
    """Map of a seed. `len(maps)` consecutive seeds give distinct maps."""
    maps = maps_of(size, p, split)
    return maps[seed % len(maps)]


def holes_of(lake_map: FrozenLakeMap) -> Holes:
    """Holes of a map, [size, size]."""
    return np.array([[cell == "H" for cell in row] for row in lake_map])


def _draw(size: int, p: float, random: np.random.RandomState) -> Holes:
    """Draws patterns of holes, [n, size, size]."""
    holes = random.random_sample((_CHUNK, size, size)) >= p
    holes[:, 0, 0] = holes[:, -1, -1] = False
    return np.asarray(holes)


def _new_patterns(patterns: Holes, met: set[bytes]) -> Holes:
    """Distinct patterns that were not met, in the order of their first; adds them to `met`."""
    places = {key: n for n, key in reversed([*enumerate(grids_as_bytes(patterns))]) if key not in met}
    met.update(places)
    return np.asarray(patterns[sorted(places.values())])


def _has_path(ice: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True where ice leads from S to G, [n]; `ice` is [n, size, size]."""
    reached = np.zeros_like(ice)
    reached[:, 0, 0] = True
    near = ~reached
    while (near != reached).any():
        near = reached.copy()
        near[:, 1:] |= reached[:, :-1]
        near[:, :-1] |= reached[:, 1:]
        near[:, :, 1:] |= reached[:, :, :-1]
        near[:, :, :-1] |= reached[:, :, 1:]
        reached, near = near & ice, reached
    return np.asarray(reached[:, -1, -1])


def _stacked(patterns: list[Holes], size: int) -> Holes:
    """Patterns of one size, [n, size, size]; there may be none."""
    return np.array(patterns, bool).reshape(-1, size, size)


def _surroundings(patterns: Holes) -> set[bytes]:
    """All images of the patterns, and all patterns that differ from one of them in one cell."""
    num_cells = math.prod(patterns.shape[1:])
    one_off = np.eye(num_cells + 1, num_cells, dtype=bool)  # the last row changes nothing
    found: set[bytes] = set()
    for image in images_of(patterns):
        changed = image.reshape(-1, 1, num_cells) ^ one_off
        found.update(grids_as_bytes(changed.reshape(-1, num_cells)))
    return found


def _maps_of(patterns: Holes) -> list[FrozenLakeMap]:
    cells = np.where(patterns, ord("H"), ord("F")).astype(np.uint8)
    cells[:, 0, 0], cells[:, -1, -1] = ord("S"), ord("G")
    size = cells.shape[-1]
    rows = [row.decode() for row in grids_as_bytes(cells.reshape(-1, size))]
    return [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]
