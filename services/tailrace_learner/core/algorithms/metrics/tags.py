"""Returns of the tasks of each tag, with the number of its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace_learner.config_registry import Metric
from tailrace_learner.core.algorithms.metrics.base import Metrics, StepData
from tailrace_learner.core.algorithms.metrics.returns import returns_of

if TYPE_CHECKING:
    from tailrace_learner.core.batch.rows import PreparedGroup


def tags(step: StepData, config: Any) -> Metrics:
    """`tag/<tag>/<name>` for every name of `returns`, and `num_groups`."""
    by_tag: dict[str, list[PreparedGroup]] = {}
    for group in step.groups:
        by_tag.setdefault(group.tag, []).append(group)
    numbers: Metrics = {}
    for tag, groups in sorted(by_tag.items()):
        numbers |= {f"tag/{tag}/{name}": value for name, value in returns_of(groups).items()}
        numbers[f"tag/{tag}/num_groups"] = float(len(groups))
    return numbers


METRIC = Metric(tags)
