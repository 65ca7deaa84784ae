"""Settings of a simulated run, and its groups and episodes as they stand."""

from dataclasses import dataclass, field

from msgspec import Struct

from tailrace_cli.simulation.engine import SimEngine
from tailrace_cli.simulation.measures import Tokens
from tailrace_cli.simulation.workload import EpisodePlan
from tailrace_scheduler.core.streams.settings import EngineModel, StalePolicy

SimSpan = tuple[SimEngine, int, int, int, int]  # an engine, and `SimTurn.segments`
Timeline = list[tuple[float, list[int], list[float]]]  # time, requests and KV share of each engine


class Fault(Struct, frozen=True):
    """A server that is not like the others: `slowness` times every duration, or failing calls."""

    server: int
    slowness: float = 1.0
    fails: bool = False


class SimSettings(Struct, frozen=True, kw_only=True):
    """One cell: cluster, run and learner."""

    servers: int = 8
    group_size: int = 16
    groups_per_step: int = 32
    max_staleness: int = 4
    min_valid: int = 8
    policy: StalePolicy = "auto"
    rho: float = 0.9  # learner time of a group, as a share of the engines' work bound of it
    learner_tokens_per_s: float = 0.0  # context tokens; above 0 it replaces rho
    engine: EngineModel = EngineModel()
    releases_prefixes: bool = True  # engines are told of ended episodes, and forget their contexts
    recomputes: bool = False  # engines compute the KV of running requests again for each version
    faults: tuple[Fault, ...] = ()
    warmup_steps: int = 4
    steps: int = 10
    seed: int = 1
    synchronous: bool = False  # the learner waits for the whole batch
    closing_order: bool = False  # the learner takes what closed first, not the oldest

    def learner_s(self, tokens: Tokens, capacity: float) -> float:
        """Return the seconds in which the learner trains tokens; `capacity`: sum of engine speeds."""
        if self.learner_tokens_per_s > 0:
            return (tokens.sampled + tokens.prefilled) / self.learner_tokens_per_s
        return self.rho * tokens.work_s(self.engine) / capacity


@dataclass(slots=True, eq=False)
class SimEpisode:
    """One episode and how far it is."""

    episode_id: str
    plan: EpisodePlan
    group: "SimGroup"
    turn: int = 0
    context: int = 0
    server: str = ""
    outcome: str = ""  # "", "valid" or "cut"
    num_failed: int = 0  # calls
    spans: list[SimSpan] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimGroup:
    """One group."""

    group_id: str
    episodes: list[SimEpisode]
    unsettled: int
    started_s: float = -1.0
