"""Random FrozenLake maps and their splits.

Maps are drawn with gymnasium's `generate_random_map` from the seeds 0, 1, 2, ... and each distinct map
belongs to one split, for ever and everywhere, by a hash of its letters: a held-out map is never a
train map, whatever the process, size, seed or order. Drawing stops when both splits have
`POOL_SIZE` maps (4x4 with p = 0.8: 19,000 draws, 0.8 s, once a process), after `MAX_DRAWS`, or when
`PATIENCE` draws in a row brought no new map.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Literal, NamedTuple

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

Split = Literal["train", "held_out", "all"]
FrozenLakeMap = tuple[str, ...]  # one string per grid row, of S, F, H, G

POOL_SIZE = 1024
MAX_DRAWS = 24_000
PATIENCE = 2_000


class MapPools(NamedTuple):
    """Pairwise distinct maps in the order drawn; `every` is both splits."""

    train: tuple[FrozenLakeMap, ...]
    held_out: tuple[FrozenLakeMap, ...]
    every: tuple[FrozenLakeMap, ...]


def is_held_out(lake_map: FrozenLakeMap) -> bool:
    """The split of a map: half of all maps are held out."""
    return hashlib.blake2b("\n".join(lake_map).encode(), digest_size=1).digest()[0] < 128


@cache
def map_pools(size: int, p: float) -> MapPools:
    """All splits' maps for a grid size and a probability of ice."""
    drawn: dict[FrozenLakeMap, bool] = {}
    num_held_out = last_new = 0
    for seed in range(MAX_DRAWS):
        if seed - last_new > PATIENCE or min(num_held_out, len(drawn) - num_held_out) >= POOL_SIZE:
            break
        lake_map = tuple(generate_random_map(size, p, seed))
        if lake_map not in drawn:
            last_new = seed
            drawn[lake_map] = is_held_out(lake_map)
            num_held_out += drawn[lake_map]
    return MapPools(
        train=tuple(lake_map for lake_map, held_out in drawn.items() if not held_out),
        held_out=tuple(lake_map for lake_map, held_out in drawn.items() if held_out),
        every=tuple(drawn),
    )


def maps_of(size: int, p: float, split: Split) -> tuple[FrozenLakeMap, ...]:
    """The maps of one split; `ValueError` if these settings leave it empty."""
    pools = map_pools(size, p)
    maps = pools.every if split == "all" else getattr(pools, split)
    if not maps:
        raise ValueError(
            f"size {size} with p {p} has no {split} map ({len(pools.every)} distinct maps in all): "
            "raise size, lower p or use split 'all'"
        )
    return tuple(maps)


def map_for_seed(size: int, p: float, split: Split, seed: int) -> FrozenLakeMap:
    """Seeds walk through the split's maps, so `len(maps)` consecutive seeds give distinct maps."""
    maps = maps_of(size, p, split)
    return maps[seed % len(maps)]
