"""Capacities that could deadlock a run, refused before it starts."""

from tailrace.config import RunConfig
from tailrace_scheduler.config import SchedulerConfig

MIN_EPISODE_BYTES = 256
"""No settled episode is smaller than its own field names."""


class CapacityError(ValueError):
    """A bound under which the run could not make a single step.

    Attributes: `key` (where the bound is set), `value`, `needed` (the least that works).
    """

    def __init__(self, key: str, value: float, needed: float, reason: str) -> None:
        super().__init__(f"{key}: {value} would deadlock: {reason}; set it to at least {needed}")
        self.key = key
        self.value = value
        self.needed = needed


def check_capacity(run: RunConfig, config: SchedulerConfig) -> None:
    """Raise `CapacityError` (a `ValueError`) when one step's groups can never come together."""
    if config.max_buffered_groups < run.groups_per_step:
        raise CapacityError(
            "scheduler.max_buffered_groups",
            config.max_buffered_groups,
            run.groups_per_step,
            f"one optimizer step needs groups_per_step = {run.groups_per_step} groups at once",
        )
    least_bytes = run.groups_per_step * run.group_size * MIN_EPISODE_BYTES
    if config.max_buffered_bytes < least_bytes:
        raise CapacityError(
            "scheduler.max_buffered_bytes",
            config.max_buffered_bytes,
            least_bytes,
            f"the {run.groups_per_step * run.group_size} episodes of one optimizer step do not fit",
        )
    if config.min_valid > run.group_size:
        raise ValueError(
            f"scheduler.min_valid: {config.min_valid} can never be reached by groups of group_size = "
            f"{run.group_size}; lower it or raise group_size"
        )
    if config.eval_interim_groups > config.eval_groups:
        raise ValueError(
            f"scheduler.eval_interim_groups: {config.eval_interim_groups} is more than the set of "
            f"eval_groups = {config.eval_groups}; it takes a prefix of that set"
        )
