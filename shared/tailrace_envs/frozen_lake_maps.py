"""Random FrozenLake maps and their splits.

gymnasium's `generate_random_map` draws maps from the seeds 0, 1, 2, ... Each distinct map belongs to
one split (`splits`). Drawing stops when both splits have `POOL_SIZE` maps (4x4 with p = 0.8: 19,000
draws, 0.8 s, once per process), after `MAX_DRAWS`, or when `MAX_REPEATED_DRAWS` draws in a row gave no
new map.
"""

from functools import cache
from typing import NamedTuple

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from tailrace_envs.splits import Split, is_held_out

FrozenLakeMap = tuple[str, ...]  # one string per grid row, of S, F, H, G

POOL_SIZE = 1024
MAX_DRAWS = 24_000
MAX_REPEATED_DRAWS = 2_000


class MapPools(NamedTuple):
    """Distinct maps in the order of drawing; `every` contains both splits."""

    train: tuple[FrozenLakeMap, ...]
    held_out: tuple[FrozenLakeMap, ...]
    every: tuple[FrozenLakeMap, ...]


@cache
def map_pools(size: int, p: float) -> MapPools:
    """Draws the maps of all splits for a grid size and a probability of ice."""
    drawn: dict[FrozenLakeMap, bool] = {}
    num_held_out = last_new = 0
    for seed in range(MAX_DRAWS):
        smaller = min(num_held_out, len(drawn) - num_held_out)
        if smaller >= POOL_SIZE or seed - last_new > MAX_REPEATED_DRAWS:
            break
        lake_map = tuple(generate_random_map(size, p, seed))
        if lake_map not in drawn:
            last_new = seed
            drawn[lake_map] = is_held_out("\n".join(lake_map))
            num_held_out += drawn[lake_map]
    return MapPools(
        train=tuple(lake_map for lake_map, held_out in drawn.items() if not held_out),
        held_out=tuple(lake_map for lake_map, held_out in drawn.items() if held_out),
        every=tuple(drawn),
    )


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
