"""Tokens per second of the learner's steps, and the time to a reward, beside TRL's `GRPOTrainer`.

Run it with `make bench-learner`; TRL runs in an environment of its own. All sides have the same model
(0.8 million parameters), weights and rows, and do a whole optimizer step of them:

    padded  plain Hugging Face: eight rows a pass in the order of arrival, padded to the longest
    packed  the learner without `share_prefixes`
    shared  the learner as it is configured by default
    trl     `training_step` of TRL's trainer, given the rows, eight a pass

`ragged` rows have completions with a long tail, `grouped` ones are groups of 8 whose prompt is 75% of
their tokens. Every side counts the same tokens: those of the rows, without padding and however often
they are computed. All steps run on one thread.

The digits task is TRL's: be rewarded for the share of digits among 32 tokens, 4 prompts x 8 answers a
step. The time runs from the first step to the end of the first whose mean reward is 0.9. Ours is an
engine process beside a learner process, one thread each (`learner.digits`: weights are swapped between
two tokens, no token is more than two steps old); TRL's one process gets the better of one and two
threads. Both run in turn, several times per seed, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.sides import Step, packed_step, padded_step
from benchmarks.learner.task import GOAL, grouped_samples, num_tokens, ragged_samples
from benchmarks.results import Results, median
from tailrace_learner.adapters.compute_thread import keep_freed_memory

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SAMPLES = {"ragged": ragged_samples, "grouped": grouped_samples}
Runs = Sequence[Mapping[str, Any]]
PACKAGES = ("tailrace", "torch", "transformers")


def answer_of(
    python: Path | str, arguments: Sequence[str], threads: int = 1, timeout_s: float | None = None
) -> dict[str, Any]:
    """The last line of what a script of this benchmark prints, as JSON."""
    argv = [str(python), "-m", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(
        argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{ended.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def trl(what: str, number: int, threads: int = 1, timeout_s: float | None = None) -> dict[str, Any]:
    """Answer of TRL's side."""
    arguments = ["benchmarks.learner.trl_side", what, str(number)]
    return answer_of(TRL_PYTHON, arguments, threads, timeout_s)


def step_times_s(sides: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Each side's fastest step of so many, taken in turn after one that warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, step in sides.items():
            began_s = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - began_s)
    return {name: min(times_s[1:]) for name, times_s in found.items()}


def measure_steps(results: Results, rounds: int) -> None:
    """A row of tokens per second for both kinds of rows, and their targets."""
    theirs = trl("steps", rounds)
    results.add_version("trl", theirs["trl"])
    rates: dict[str, dict[str, float]] = {}
    for kind, make in SAMPLES.items():
        samples = make()
        sides = {
            "padded": padded_step(samples),
            "packed": packed_step(samples, share_prefixes=False),
            "shared": packed_step(samples, share_prefixes=True),
        }
        times_s = step_times_s(sides, rounds) | {"trl": min(wall_s for wall_s, _ in theirs[kind])}
        rates[kind] = {name: num_tokens(samples) / seconds for name, seconds in times_s.items()}
        results.add(what=f"tokens/s, {kind}", **rates[kind])
    ragged, grouped = rates["ragged"], rates["grouped"]
    results.at_least("packed over padded, ragged rows", ragged["packed"] / ragged["padded"], 1.5)
    results.at_least("shared over padded, grouped rows", grouped["shared"] / grouped["padded"], 3.0)


def seconds_to_goal(answer: Mapping[str, Any]) -> float:
    """Wall time of the whole training; infinite if it ended below the goal."""
    return float(answer["times_s"][-1]) if answer["rewards"][-1] >= GOAL else float("inf")


def trl_digits() -> tuple[int, dict[str, Any]]:
    """TRL's first seed at its better number of threads, and that number."""
    began_s = time.perf_counter()
    alone = trl("digits", 0, threads=1)
    took_s = time.perf_counter() - began_s
    try:  # where others compute too, two threads wait for each other: many times slower
        both = trl("digits", 0, threads=2, timeout_s=2 * took_s)
    except subprocess.TimeoutExpired:
        return 1, alone
    return (2, both) if seconds_to_goal(both) < seconds_to_goal(alone) else (1, alone)


def in_turn(first: Mapping[str, Any], best: int, seed: int, rounds: int) -> tuple[Runs, Runs]:
    """So many runs of ours and of TRL's with one seed; `first` is TRL's first one with seed 0."""
    ours: list[Mapping[str, Any]] = []
    theirs = [first] if seed == 0 else []
    for _ in range(rounds):
        ours.append(answer_of(sys.executable, ["benchmarks.learner.digits", "--seed", str(seed)]))
        if len(theirs) < rounds:
            theirs.append(trl("digits", seed, best))
    return ours, theirs


def measure_digits(results: Results, seeds: int, rounds: int) -> None:
    """A row per seed, and the target."""
    best, first = trl_digits()
    ratios = []
    for seed in range(seeds):
        sides = in_turn(first, best, seed, rounds)
        ours, theirs = (median([seconds_to_goal(run) for run in runs]) for runs in sides)
        ours_steps, trl_steps = (median([len(run["rewards"]) for run in runs]) for runs in sides)
        ratios.append(ours / theirs)
        results.add(
            what=f"seconds to reward {GOAL}, seed {seed}",
            ours=ours,
            ours_steps=ours_steps,
            trl=theirs,
            trl_steps=trl_steps,
            trl_threads=best,
        )
    results.at_most("time to reward over TRL's, median of seeds", median(ratios), 1 / 3)


def main() -> int:
    """Measure, print the table and write it; the exit code says whether the targets hold."""
    parser = argparse.ArgumentParser(description="Tokens/s of the learner and time to a reward.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--digits_rounds", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    results = Results(
        "learner",
        PACKAGES,
        rounds=args.rounds,
        seeds=args.seeds,
        digits_rounds=args.digits_rounds,
    )
    measure_steps(results, args.rounds)
    measure_digits(results, args.seeds, args.digits_rounds)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
