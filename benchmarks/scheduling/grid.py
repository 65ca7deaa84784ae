"""Grids of the comparison: the short run, eight seeds at the goals, the full run.

The short run plays every cell of the goals with the baselines that are best there, every policy in two
cells, and around e 64 and S 4 it varies one axis at a time. Goals and single turns at S 1 and 4 have 3
seeds, everything else has one, so that two cores need less than 8 minutes. `at_goals` adds 8 seeds of
ours and of the best baselines in the cells of the goals. The full run plays every
policy with 8 seeds in every cell of e and S, and varies the other axes around e 64.
"""

import itertools
from collections.abc import Iterable, Iterator

from benchmarks.scheduling.cells import FILES, MANY_TURNS, OURS, Side
from benchmarks.scheduling.cells import SchedulingCell as Cell
from benchmarks.scheduling.policies import POLICIES
from tailrace_cli.simulation.workload import BUILT_IN

Job = tuple[Cell, Side, int]  # with its seed
FIRST_SEED = 11
HOST_KV = 2_000_000
FAILS = "fails fast"

VERL, AIMD = Side("verl_least_in_flight", "mask"), Side("prime_rl_aimd", "mask")
VERL_WAIT, TOKENS_WAIT = Side("verl_least_in_flight", "wait"), Side("least_tokens", "wait")
AIMD_WAIT, ROUND_ROBIN = Side("prime_rl_aimd", "wait"), Side("round_robin", "mask")
SYNCHRONOUS = tuple(Side(one, "mask", True) for one in ("synchronous", "april", "tail_batching"))
OWN_RULE = tuple(Side(name, "mask") for name in POLICIES)
OUR_RULE = tuple(Side(name, "auto") for name in POLICIES)

GOALS = (
    (Cell("logn", 256, 4), 0.96),
    (Cell("pareto", 256, 4), 0.96),
    (Cell("logn", 64, 4), 0.72),
    (Cell("pareto", 64, 4), 0.64),
    (Cell("logn", 256, 1), 0.83),
    (Cell("pareto", 256, 1), 0.75),
    (Cell("agent", 256, 4), 0.78),
    (Cell("agent", 256, 1), 0.76),
    (Cell("agent", 256, 4, host_kv=HOST_KV), 0.86),
    (Cell("agent", 64, 4), 0.73),
    (Cell("agent", 64, 2), 0.58),
    (Cell("agent", 64, 1), 0.42),
    (Cell("logn", 256, 4, fault=FAILS), 0.97),
    (Cell("logn", 256, 4, fault="5x slow"), 0.95),
    (Cell("logn", 256, 4, fault="half speed"), 0.95),
)
WORKLOADS = (*BUILT_IN, *FILES)
LONGEST = "tracelab_x16"  # a run of it takes 14 to 17 s


def short() -> list[Job]:
    """Return the jobs of the short run, first seeds first."""
    return sorted(dict.fromkeys(_short()), key=lambda job: job[2])


def at_goals() -> list[Job]:
    """Return the jobs of the short run, and 8 seeds in the goals' cells, first seeds first."""
    jobs = list(_short())
    for cell, _ in GOALS:
        jobs += _jobs(cell, (OURS, *rivals(cell)), 8)
    jobs += _jobs(Cell("logn", 64, 4), (Side("least_tokens", "auto"),), 8)
    return sorted(dict.fromkeys(jobs), key=lambda job: job[2])


def full() -> list[Job]:
    """Return the jobs of the full run."""
    sides = (OURS, *SYNCHRONOUS, *OWN_RULE, *OUR_RULE, VERL_WAIT, TOKENS_WAIT, AIMD_WAIT)
    cells = [cell for cell, _ in GOALS]
    for name in WORKLOADS:
        cells += [Cell(name, e, s) for e, s in itertools.product((16, 64, 256), (0, 1, 2, 4, 8))]
        cells += [cell for staleness in (1, 4) for cell in around(name, 64, staleness)]
        cells += [Cell(name, 64, staleness, servers=64) for staleness in (1, 4)]
    jobs = [job for cell in cells for job in _jobs(cell, sides, 8)]
    jobs += _jobs(Cell("logn", 64, 4, servers=512), (OURS, VERL, AIMD), 8)
    return list(dict.fromkeys(jobs))


def _short() -> Iterator[Job]:
    for cell, _ in GOALS:
        best, *others = rivals(cell)
        yield from _jobs(cell, (OURS, best), 3)
        yield from _jobs(cell, others, 1)
    yield from _jobs(Cell("logn", 64, 4, servers=64), (OURS, VERL_WAIT), 1)
    for e in (64, 256):
        yield from _jobs(Cell("agent", e, 4, releases=False), (OURS, AIMD), 1)
    for name in WORKLOADS:
        usual = [Cell(name, 64, 4)] if name == LONGEST else [Cell(name, 64, 1), Cell(name, 64, 4)]
        others: list[Cell] = []
        if name in ("logn", "agent"):
            others += [Cell(name, 16, 4), *(Cell(name, 64, staleness) for staleness in (0, 2, 8))]
            others += around(name, 64, 4)
        for cell in (*usual, *others):
            seeds = 3 if cell in usual and name not in MANY_TURNS else 1
            yield from _jobs(cell, (OURS, rivals(cell)[0]), seeds)
    yield from _jobs(Cell("logn", 64, 4), (*SYNCHRONOUS, *OWN_RULE, *OUR_RULE), 1)
    yield from _jobs(Cell("agent", 64, 2), (*SYNCHRONOUS, *OWN_RULE), 1)


def rivals(cell: Cell) -> tuple[Side, ...]:
    """Return the baselines of the short run in a cell, the one that is usually best first."""
    if cell.fault == FAILS:
        return (ROUND_ROBIN, AIMD, VERL)
    if cell.fault:
        return (VERL,)
    if cell.workload in MANY_TURNS:
        return (AIMD,)
    return (VERL_WAIT, VERL)


def around(name: str, e: int, staleness: int) -> Iterator[Cell]:
    """Yield cells with another learner, less KV, or host memory."""
    yield from (Cell(name, e, staleness, rho=rho) for rho in (0.5, 1.3))
    yield Cell(name, e, staleness, kv=250_000)
    if name in MANY_TURNS:
        yield Cell(name, e, staleness, kv=250_000, host_kv=HOST_KV)


def _jobs(cell: Cell, sides: Iterable[Side], seeds: int) -> list[Job]:
    return [(cell, side, seed) for side in sides for seed in range(FIRST_SEED, FIRST_SEED + seeds)]


def name_of(cell: Cell) -> str:
    """Return the name of a cell in tables: the axes that differ from the usual ones."""
    usual = Cell("", 0, 0)
    parts = [f"{cell.workload} e{cell.per_server} S{cell.staleness}"]
    parts += [
        f"{key} {getattr(cell, key)}"
        for key in ("servers", "rho", "kv", "host_kv", "fault")
        if getattr(cell, key) != getattr(usual, key)
    ]
    parts += [] if cell.releases else ["engines not told"]
    return ", ".join(parts)
