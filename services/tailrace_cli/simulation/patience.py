"""Limits beyond which a simulated run is given up: its policy finishes no more steps.

The limits are far from those of a policy that works. A step may take 20 times the least time of the
S + 1 steps that are under way, and it may lose 100 groups for each one that it trains.
"""

import numpy as np

from tailrace_cli.simulation.measures import Tokens, solo_s
from tailrace_cli.simulation.records import SimSettings
from tailrace_cli.simulation.workload import Workload

LONGEST = 20.0  # times the least seconds of the steps under way
MOST_LOST = 100  # groups with too few valid members, for each group of a step


class StuckRunError(RuntimeError):
    """A run finishes no step within the limits; the message gives the step and the limit."""


class Patience:
    """Limits of one step; `ideal_s` are the least seconds of the steps that are under way."""

    def __init__(self, settings: SimSettings, ideal_s: float) -> None:
        self._ideal_s = ideal_s
        self._groups = settings.groups_per_step
        self._step, self._begun_s = 0, 0.0

    def step_done(self, now_s: float) -> None:
        """The next step begins."""
        self._step += 1
        self._begun_s = now_s

    def check(self, now_s: float, num_lost: int) -> None:
        """Raise `StuckRunError` if the step has passed a limit; `num_lost` groups were lost in it."""
        if now_s - self._begun_s > LONGEST * self._ideal_s:
            raise StuckRunError(
                f"step {self._step} took more than {LONGEST:g} times the {self._ideal_s:.0f} s "
                "in which all steps under way can be made"
            )
        if num_lost > MOST_LOST * self._groups:
            raise StuckRunError(
                f"step {self._step} lost more than {MOST_LOST} groups for each of the "
                f"{self._groups} that it needs"
            )


def ideal_s(settings: SimSettings, capacity: float, workload: Workload) -> float:
    """Return the least seconds for S + 1 steps at once, each with the first groups that are drawn."""
    rng, tokens = np.random.default_rng(settings.seed), Tokens()
    groups = range(settings.groups_per_step)
    plans = [plan for _ in groups for plan in workload.draw(rng, settings.group_size)]
    for plan in plans:
        context = 0
        for new, out, _ in plan:
            context += new
            tokens.add(Tokens(out, out * (context + out / 2), new))
            context += out
    step_s = max(
        tokens.work_s(settings.engine) / (capacity or 1.0),
        settings.learner_s(tokens, capacity or 1.0),
    )
    longest_s = max(solo_s(settings.engine, plan) for plan in plans)
    return max((settings.max_staleness + 1) * step_s, longest_s)
