"""A policy's run of the calibration, simulated and on real services; both give the same measures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.calibration.cluster import RUN, Cluster, cluster, sums
from benchmarks.calibration.fake_learner import FakeLearner
from benchmarks.calibration.plans import FASTER, WORKLOAD, PlanBook
from benchmarks.scheduling.policies import POLICIES
from tailrace.config import RunConfig
from tailrace_cli.simulation.measures import Tally, summary
from tailrace_cli.simulation.records import SimSettings
from tailrace_cli.simulation.world import World
from tailrace_scheduler.core.streams.settings import EngineModel, StalePolicy

SERVERS, GROUP_SIZE, RHO, MIN_VALID = 4, 16, 0.9, 8
COSTS = {key: getattr(EngineModel(), key) / FASTER for key in ("a_s", "c_s", "d_s", "e_s")}
MODEL = EngineModel(**COSTS, kv_tokens=250_000)


class Case(NamedTuple):
    """One policy: a placement (empty: ours) and a staleness rule."""

    placement: str
    rule: StalePolicy

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.placement or 'ours'}, {self.rule}"


class Scale(NamedTuple):
    """Size of a run."""

    groups_per_step: int
    max_staleness: int
    warmup_steps: int
    steps: int
    seed: int


def simulated(case: Case, scale: Scale) -> dict[str, Any]:
    """Measures of the simulated run."""
    settings = SimSettings(
        servers=SERVERS,
        group_size=GROUP_SIZE,
        groups_per_step=scale.groups_per_step,
        max_staleness=scale.max_staleness,
        min_valid=MIN_VALID,
        policy=case.rule,
        rho=RHO,
        engine=MODEL,
        warmup_steps=scale.warmup_steps,
        steps=scale.steps,
        seed=scale.seed,
    )
    placement = POLICIES[case.placement] if case.placement else None
    measures = World(settings, WORKLOAD, placement).run()
    # Tokens of a real run have no time of their own: both sides count those trained in the window.
    return measures | {"efficiency": measures["trained_work"]}


def experiment(case: Case, scale: Scale) -> dict[str, Any]:
    """Experiment file of the real run."""
    return {
        "seed": scale.seed,
        "group_size": GROUP_SIZE,
        "groups_per_step": scale.groups_per_step,
        "max_staleness": scale.max_staleness,
        "max_steps": 1_000_000,
        "eval_steps": 0,
        "stale_groups": case.rule,
        "scheduler": {
            "tags": ["planned"],
            "eval_groups": 1,
            "group_timeout_s": 3600.0,
            "min_valid": MIN_VALID,
        },
        "agents": {
            "datasets": {"planned": {"path": "benchmarks.calibration.plans:rows"}},
            "agent_loops": {"planned": "benchmarks.calibration.plans:PlannedLoop"},
            "loop_args": {"max_turns": 64},
            "generating_args": {"max_new_tokens": 1 << 20},
            "eval_generating_args": {"max_new_tokens": 1 << 20},
            "max_episode_tokens": WORKLOAD.context_limit,
            "max_concurrent_episodes": 4096,
            "render_episodes": 0,
            "keep_episodes": 0,
        },
        "inference": {
            "engine": "benchmarks.calibration.fake_engine:FakeEngine",
            "engine_args": COSTS,
            "kv_cache_tokens": MODEL.kv_tokens,
            "max_running": MODEL.max_running,
            "kv_on_update": "keep",
        },
    }


def services(case: Case) -> dict[str, list[str]]:
    """Services of the real run."""
    found = {
        "weight_sync": ["tailrace_weight_sync"],
        "scheduler": ["tailrace_scheduler"],
        "reward": ["tailrace_reward"],
        "agents": ["tailrace_agents", "--worker-id", "agents-0"],
    }
    if case.placement:
        found["scheduler"] = ["benchmarks.calibration.scheduler", "--placement", case.placement]
    for number in range(SERVERS):
        name = f"s{number}"  # as simulated ones, by whose numbers baselines break ties
        found[name] = ["tailrace_inference", "--server-id", name]
    return found


async def measured(case: Case, scale: Scale, folder: Path) -> dict[str, Any]:
    """Measures of the real run."""
    made = experiment(case, scale)
    async with cluster(folder, made, services(case), seed=scale.seed) as world:
        keys = ("group_size", "groups_per_step", "max_staleness", "stale_groups")
        run = RunConfig(exp_name=RUN, **{key: made[key] for key in keys})
        plans = PlanBook(scale.seed, GROUP_SIZE)
        learner = FakeLearner(
            world.bus, world.store, run, plans=plans, model=MODEL, rho=RHO, num_servers=SERVERS
        )
        await learner.begin()
        await learner.train(scale.warmup_steps)
        learner.tally, learner.cut = Tally(), []
        cpu_s, began_s = _cpu_s(world), time.monotonic()
        await learner.train(scale.steps)
        elapsed_s = time.monotonic() - began_s
        cores = (_cpu_s(world) - cpu_s) / elapsed_s
        await learner.close()
    return _measures(learner, scale, elapsed_s, folder) | {"cores": cores}


def _measures(learner: FakeLearner, scale: Scale, elapsed_s: float, folder: Path) -> dict[str, Any]:
    spent: dict[str, float] = dict.fromkeys(("decode_s", "prefill_s", "reprefill_s", "preempted"), 0.0)
    late_s = 0.0
    sampled: dict[str, int] = {}
    for lines in sums(folder).values():
        first, last = lines[scale.warmup_steps], lines[scale.warmup_steps + scale.steps]
        for key in spent:
            spent[key] += last[key] - first[key]
        late_s = max(late_s, last["late_s"])
        for episode_id, count in lines[-1]["sampled"].items():
            sampled[episode_id] = sampled.get(episode_id, 0) + count
    learner.tally.thrown = sum(sampled.get(one, 0) for one in learner.cut)
    found = summary(learner.tally, elapsed_s, SERVERS, MODEL, scale.max_staleness, spent)
    return found | {"late_s": late_s, "episodes": len(sampled)}


def _cpu_s(world: Cluster) -> float:
    times = [process.cpu_times() for process in world.processes.values()]
    return sum(one.user + one.system for one in times)
