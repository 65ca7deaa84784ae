"""Cells of the comparison: workload, batch, staleness, faults; and the policies that play them."""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduling.policies import POLICIES
from benchmarks.scheduling.policies.tail_batching import TailBatching
from tailrace_cli.simulation.records import Fault, SimSettings
from tailrace_cli.simulation.traces import load_trace
from tailrace_cli.simulation.workload import BUILT_IN, Workload
from tailrace_cli.simulation.world import World
from tailrace_scheduler.core.streams.settings import EngineModel, StalePolicy

TRACES = Path(__file__).parent / "traces"
FILES = {
    "r1": ("servegen_deepseek_r1_quantiles.json", 1.0),
    "tau_x8": ("tau_airline_gpt4o_groups.json", 8.0),
    "tracelab_x16": ("tracelab_multi_session_large.csv", 16.0),
}
MANY_TURNS = ("agent", "tau_x8", "tracelab_x16")
FAULTS: dict[str, tuple[Fault, ...]] = {
    "": (),
    "fails fast": (Fault(0, fails=True),),
    "5x slow": (Fault(0, slowness=5.0),),
    "half speed": (Fault(0, slowness=2.0),),
}


class SchedulingCell(NamedTuple):
    """One scenario."""

    workload: str
    per_server: int  # e: episodes of a step for each server
    staleness: int
    servers: int = 8
    rho: float = 0.9
    kv: int = 500_000
    host_kv: int = 0
    fault: str = ""
    releases: bool = True  # engines can be told of ended episodes; the baselines do not tell them


class Side(NamedTuple):
    """A placement policy with a staleness rule; `ours` is the default of the core."""

    name: str
    rule: StalePolicy
    is_synchronous: bool = False


OURS = Side("ours", "auto")


def workload(name: str) -> Workload:
    """Return a workload by its name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    file, scale = FILES[name]
    return load_trace(TRACES / file, scale)


def _steps(cell: SchedulingCell) -> int:
    """Return the measured steps: enough tokens for a steady mean, few enough for a short run."""
    by_batch = 640 // cell.per_server if cell.workload in MANY_TURNS else 2_048 // cell.per_server
    return min(max(by_batch * 8 // cell.servers, 4), 40)


def play(cell: SchedulingCell, side: Side, seed: int) -> dict[str, Any]:
    """Simulate one cell and return its measures."""
    staleness = 0 if side.is_synchronous and side.name != "april" else cell.staleness
    staleness = 1 if side.name == "april" else staleness
    many = cell.per_server >= 256
    settings = SimSettings(
        servers=cell.servers,
        groups_per_step=max(cell.per_server * cell.servers // 16, 1),
        max_staleness=staleness,
        policy=side.rule,
        rho=cell.rho,
        engine=EngineModel(kv_tokens=cell.kv, host_kv_tokens=cell.host_kv),
        releases_prefixes=cell.releases and side == OURS,
        faults=FAULTS[cell.fault],
        warmup_steps=staleness + 2 if many else staleness + 4,
        steps=_steps(cell),
        seed=seed,
        synchronous=side.is_synchronous,
        closing_order=side != OURS and side.rule in ("mask", "drop"),
    )
    if side.name == "tail_batching":
        return TailBatching(settings, workload(cell.workload)).run()
    placement = POLICIES[side.name] if side != OURS and side.name in POLICIES else None
    return World(settings, workload(cell.workload), placement).run()
