"""Measures of a simulated run: work bound, efficiency, attainment, waste, ages, latencies."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace_cli.simulation.workload import EpisodePlan
from tailrace_scheduler.core.streams.settings import EngineModel


@dataclass(slots=True)
class Tokens:
    """Sums over tokens: sampled, their context lengths, prefilled once."""

    sampled: float = 0.0
    context_sum: float = 0.0
    prefilled: float = 0.0

    def add(self, other: "Tokens") -> None:
        """Add another sum."""
        self.sampled += other.sampled
        self.context_sum += other.context_sum
        self.prefilled += other.prefilled

    def work_s(self, model: EngineModel) -> float:
        """Return the work bound W."""
        return model.work_s(self.prefilled, self.sampled, self.context_sum)


@dataclass(slots=True)
class Tally:
    """Sums of the measured window; the world adds to it.

    Tokens count in `useful`, `masked`, `thrown` and `ages` if they were sampled in the window, whenever
    they were trained; everything else belongs to the steps that the learner did in it.
    """

    useful: Tokens = field(default_factory=Tokens)  # unmasked, of trained groups
    trained: Tokens = field(default_factory=Tokens)  # unmasked, whenever sampled
    masked: float = 0.0
    thrown: float = 0.0
    lengths: float = 0.0  # of trained members
    num_lengths: int = 0
    natural: float = 0.0  # of all members of groups that were trained or dropped
    num_natural: int = 0
    ages: dict[int, float] = field(default_factory=dict)
    num_lost: int = 0  # groups with too few valid members
    latencies_s: list[float] = field(default_factory=list)
    paths_s: list[float] = field(default_factory=list)  # longest solo latency of each step
    learner_s: float = 0.0  # busy
    steps: int = 0

    def add_tokens(self, later: "Tally") -> None:
        """Add the tokens that were sampled in the window and had their end after it."""
        self.useful.add(later.useful)
        self.masked += later.masked
        self.thrown += later.thrown
        for age, count in later.ages.items():
            self.ages[age] = self.ages.get(age, 0.0) + count


def summary(
    tally: Tally,
    elapsed_s: float,
    capacity: float,
    model: EngineModel,
    staleness: int,
    engines: dict[str, float],
) -> dict[str, Any]:
    """Return the measures of one run; `capacity` is the sum of engine speeds."""
    work_s = tally.useful.work_s(model)
    steps = max(tally.steps, 1)
    sampled = tally.useful.sampled + tally.masked + tally.thrown
    path_s = float(np.mean(tally.paths_s)) / (staleness + 1) if tally.paths_s else 0.0
    bound_s = max(work_s / steps / capacity, tally.learner_s / steps, path_s)
    natural = tally.natural / max(tally.num_natural, 1)
    engine_s = max(elapsed_s * capacity, 1e-9)
    latencies = tally.latencies_s or [0.0]
    return {
        "efficiency": work_s / engine_s,
        "trained_work": tally.trained.work_s(model) / engine_s,
        "attainment": bound_s * steps / max(elapsed_s, 1e-9),
        "masked": tally.masked / max(sampled, 1.0),
        "thrown": tally.thrown / max(sampled, 1.0),
        "length_bias": tally.lengths / max(tally.num_lengths, 1) / max(natural, 1e-9),
        "lost_groups": tally.num_lost / max(len(tally.latencies_s), 1),
        "group_p50_s": float(np.quantile(latencies, 0.5)),
        "group_p99_s": float(np.quantile(latencies, 0.99)),
        "reprefill": engines["reprefill_s"] / engine_s,
        "prefill": engines["prefill_s"] / engine_s,
        "decode": engines["decode_s"] / engine_s,
        "preemptions": engines["preempted"],
        "learner_idle": 1.0 - tally.learner_s / max(elapsed_s, 1e-9),
        "seconds_per_step": elapsed_s / steps,
        "trained_tokens_per_s": tally.trained.sampled / max(elapsed_s, 1e-9),
        "steps": tally.steps,
        "ages": {str(age): n / max(sampled, 1.0) for age, n in sorted(tally.ages.items())},
    }


def solo_s(model: EngineModel, plan: EpisodePlan) -> float:
    """Return the latency of an episode that has a server to itself."""
    context, total = 0, 0.0
    for new, out, tool_s in plan:
        total += model.e_s * new + tool_s
        context += new
        total += out * (model.a_s + model.c_s + model.d_s * (context + out / 2))
        context += out
    return total
