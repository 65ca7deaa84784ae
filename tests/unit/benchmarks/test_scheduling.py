"""Scheduling baselines: rounds of tail batching, and policies that finish no step."""

from benchmarks.bench_scheduler import played
from benchmarks.scheduling.cells import SchedulingCell, Side
from benchmarks.scheduling.policies.tail_batching import TailBatching
from tailrace_cli.simulation.records import SimSettings
from tailrace_cli.simulation.workload import BUILT_IN
from tailrace_cli.simulation.world import World

ROUNDS = SimSettings(
    servers=2,
    groups_per_step=4,
    max_staleness=0,
    policy="mask",
    synchronous=True,
    warmup_steps=0,
    steps=5,
)


def test_tail_batching_throws_work_away_and_still_beats_whole_batches() -> None:
    whole = World(ROUNDS, BUILT_IN["logn"]).run()
    rounds = TailBatching(ROUNDS, BUILT_IN["logn"]).run()
    assert rounds["steps"] == 5
    assert rounds["thrown"] > 0.1
    assert rounds["masked"] == 0.0
    assert rounds["efficiency"] > whole["efficiency"]


def test_a_policy_that_finishes_no_step_counts_as_0_with_the_reason() -> None:
    cell = SchedulingCell("logn", 64, 4, servers=4, fault="fails fast")
    made = played((cell, Side("verl_least_in_flight", "mask"), 11))
    assert set(made.measures.values()) == {0.0}
    assert "lost more than 100 groups" in made.gave_up
