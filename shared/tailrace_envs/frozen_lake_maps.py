"""Random FrozenLake maps and their splits.

Maps are drawn as gymnasium's `generate_random_map` draws them: every cell is ice with probability p,
and a map without a path from S to G is drawn again. A hash of a map's holes, the same for its mirror
images and rotations, holds out one map of twelve. A map within one cell of a held-out map, or of a
mirror image or rotation of one, belongs to neither split. So no held-out map resembles a train map.

Drawing stops when `POOL_SIZE` maps are held out, or after `MAX_DRAWS` (4x4 with p = 0.8: 0.5 s, once
per process).
"""

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_envs.splits import Split, images_of, is_held_out, symmetric_text

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
    held_out: set[bytes] = set()
    for _ in range(MAX_DRAWS // _CHUNK):
        fresh = _new_maps(_draw(size, p, random), drawn)
        drawn |= fresh
        held_out |= {
            key
            for key, holes in fresh.items()
            if is_held_out(f"lake {symmetric_text(holes)}", HELD_OUT_SHARE)
        }
        if len(held_out) >= POOL_SIZE:
            break
    near = _surroundings([drawn[key] for key in held_out])
    maps = {key: _map_of(holes) for key, holes in drawn.items()}
    return MapPools(
        train=tuple(sorted((maps[key] for key in drawn if key not in near), key=_digest)),
        held_out=tuple(maps[key] for key in drawn if key in held_out),
        every=tuple(maps.values()),
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
    """Draws patterns of holes that leave a path, [n, size, size]."""
    ice = random.random_sample((_CHUNK, size, size)) < p
    ice[:, 0, 0] = ice[:, -1, -1] = True
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
    return np.asarray(~ice[reached[:, -1, -1]])


def _new_maps(patterns: Holes, known: dict[bytes, Holes]) -> dict[bytes, Holes]:
    keyed = {holes.tobytes(): holes for holes in patterns}
    return {key: holes for key, holes in keyed.items() if key not in known}


def _surroundings(patterns: list[Holes]) -> set[bytes]:
    """All images of the patterns, and all patterns that differ from one of them in one cell."""
    found: set[bytes] = set()
    for holes in patterns:
        for image in images_of(holes):
            one_off = np.repeat(image.reshape(1, -1), image.size + 1, axis=0)
            one_off[np.arange(image.size), np.arange(image.size)] ^= True
            found.update(row.tobytes() for row in one_off)
    return found


def _map_of(holes: Holes) -> FrozenLakeMap:
    cells = np.where(holes, "H", "F")
    cells[0, 0], cells[-1, -1] = "S", "G"
    return tuple("".join(row) for row in cells)
