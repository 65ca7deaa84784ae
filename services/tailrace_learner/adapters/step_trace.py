"""Spans of an optimizer step: the wait of sampled episodes in the buffer, their training, the step.

A step trains many episodes. Its own spans are in the trace of the first sampled one; the other sampled
episodes have a span that links to it.
"""

from collections.abc import Sequence

from tailrace import tracing
from tailrace_protos.event import StepFinished
from tailrace_protos.trajectory import TrajectoryGroup


class StepTrace:
    """Sampled episodes of one step, with the time at which the learner took each."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, float]] = []  # traceparent of the root, Unix time

    def take(self, groups: Sequence[TrajectoryGroup], now_unix_s: float) -> None:
        """Records how long the sampled episodes of new groups waited in the buffer."""
        for group in groups:
            for member in group.members:
                if root := tracing.episode(member.episode_id):
                    self._taken.append((root, now_unix_s))
                    tracing.record("buffer", root, member.finished_unix_s, now_unix_s)

    def end(self, finished: StepFinished) -> str:
        """Records the step; returns the `traceparent` of its span, empty without a sampled episode."""
        if not self._taken:
            return ""
        (first, begun_unix_s), *others = self._taken
        step = tracing.record(
            "train step",
            first,
            begun_unix_s,
            finished.finished_unix_s,
            links=[root for root, _ in others],
            step=finished.step,
            num_groups=len(finished.group_ids),
        )
        for root, taken_unix_s in others:
            ended = finished.finished_unix_s
            tracing.record("train", root, taken_unix_s, ended, links=[step], step=finished.step)
        return step
