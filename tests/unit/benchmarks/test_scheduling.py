"""Scheduling baselines: rounds of tail batching, and policies that finish no step."""

import pytest

from benchmarks.bench_scheduler import MEASURES, Played, played, ratios
from benchmarks.scheduling.cells import OURS, SchedulingCell, Side
from benchmarks.scheduling.grid import GOALS, at_goals, rivals
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


def test_ours_is_compared_with_a_baseline_over_the_seeds_of_the_baseline() -> None:
    """One seed of a baseline says nothing beside the mean of eight of ours."""
    cell, baseline = SchedulingCell("logn", 64, 4), Side("least_tokens", "mask")
    rows = {
        (cell, OURS): {11: _efficient(0.7), 12: _efficient(0.9)},
        (cell, baseline): {11: _efficient(0.5)},
    }
    assert list(ratios(rows)) == [(pytest.approx(1.4), "logn e64 S4")]


def test_every_goal_has_eight_seeds_of_ours_and_of_its_best_baselines() -> None:
    jobs = at_goals()
    for cell, _ in GOALS:
        for side in (OURS, *rivals(cell)):
            assert {seed for there, by, seed in jobs if (there, by) == (cell, side)} == set(
                range(11, 19)
            )


def _efficient(value: float) -> Played:
    return Played(dict.fromkeys(MEASURES, value))
