"""When the run of `bench_observe` samples episodes: by the clock, which all its processes share."""

BLOCK_S = 20.0
_ON = (1, 2)  # of the four blocks of a cycle


def is_on(unix_s: float) -> bool:
    """Tell whether a block is on."""
    return int(unix_s // BLOCK_S) % 4 in _ON
