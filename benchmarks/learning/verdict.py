"""Goals of the runs: algorithms learn; asynchrony saves time without loss of success."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.learning.recipes import RECIPES
from benchmarks.learning.runs import Outcome
from benchmarks.results import Results, median

MIN_GAIN = 0.3  # of greedy success: what is learnt, not noise that is removed
MIN_AHEAD = 0.001  # of the best simple player: one task more, a tie is not above it
MAX_RUN_S = 600.0
MIN_SPEEDUP = 1.5
_MIN_NOISE = 0.02  # of a mean of three success rates over 494 episodes


def judge(results: Results, outcomes: Sequence[Outcome]) -> None:
    """Adds the targets of all recipes that were run."""
    for recipe in RECIPES:
        of_recipe = [outcome for outcome in outcomes if outcome.recipe == recipe.name]
        if not of_recipe:
            continue
        gain = min(outcome.greedy[-1][1] - outcome.greedy[0][1] for outcome in of_recipe)
        results.at_least(f"{recipe.name}: gain of greedy success, worst seed", gain, MIN_GAIN)
        ahead = min(outcome.greedy[-1][1] - outcome.best_baseline for outcome in of_recipe)
        results.at_least(f"{recipe.name}: greedy success over the best simple player", ahead, MIN_AHEAD)
        # Other work slows a run: a time within the limit is within it, one beyond it says nothing.
        timed = [one.total_s for one in of_recipe if one.had_machine or one.total_s <= MAX_RUN_S]
        if timed:
            unknown = len(of_recipe) - len(timed)
            left_out = f", without {unknown} of {len(of_recipe)} beside other work" if unknown else ""
            what = f"{recipe.name}: seconds of the slowest run{left_out}"
            results.at_most(what, max(timed), MAX_RUN_S)
    _compare(results, outcomes)


def _compare(results: Results, outcomes: Sequence[Outcome]) -> None:
    waiting = [outcome for outcome in outcomes if outcome.recipe == "slow_lake_synchronous"]
    streaming = [outcome for outcome in outcomes if outcome.recipe == "slow_lake_asynchronous"]
    if not waiting or not streaming:
        return
    ends = [[outcome.end for outcome in group] for group in (waiting, streaming)]
    loss = statistics.mean(ends[0]) - statistics.mean(ends[1])
    results.at_most("success lost by asynchrony, in mean", loss, max(_MIN_NOISE, _noise(ends)))
    # Seed by seed: runs of a seed are made one after the other, others perhaps on another day.
    timed = [{o.seed: o.training_s for o in group if o.had_machine} for group in (waiting, streaming)]
    seeds = timed[0].keys() & timed[1].keys()
    ratios = [timed[0][seed] / timed[1][seed] for seed in seeds]
    if ratios:
        unknown = len({o.seed for o in waiting} & {o.seed for o in streaming}) - len(seeds)
        left_out = f", of seed {', '.join(map(str, sorted(seeds)))} alone" if unknown else ""
        what = f"asynchronous training against synchronous, in wall time{left_out}"
        results.at_least(what, median(ratios), MIN_SPEEDUP)


def _noise(ends: Sequence[Sequence[float]]) -> float:
    """Two standard errors of the difference of the means."""
    if any(len(values) < 2 for values in ends):
        return 0.0
    return 2.0 * math.sqrt(sum(statistics.variance(values) / len(values) for values in ends))
