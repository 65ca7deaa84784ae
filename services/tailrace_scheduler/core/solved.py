"""Tells a solved task from one that teaches nothing: the groups of both have equal rewards (pure).

A group is solved if all its valid episodes succeed: the task reported a success of 1, or it reports
none and the reward is at least 1. A group that is not known counts as unsolved.
Nine of ten are enough: a policy that always does the same fails at a few tasks.
"""

from collections.abc import Iterable

from tailrace_protos.event import EpisodeSettled, GroupClosed

SOLVED_SHARE = 0.9
_REMEMBERED = 1 << 16  # groups that the learner has, or may get again after a resume


class SolvedGroups:
    """Solved and unsolved groups among those that trained no token in a row."""

    def __init__(self) -> None:
        self._open: dict[str, bool] = {}  # whether all valid episodes of it have succeeded so far
        self._closed: dict[str, bool] = {}
        self.num_solved = self._num_unsolved = 0

    @property
    def are_solved(self) -> bool:
        """Tell whether nearly all of them are solved."""
        return 0 < self.num_solved >= SOLVED_SHARE * (self.num_solved + self._num_unsolved)

    def settled(self, body: EpisodeSettled) -> None:
        """Take an episode of training."""
        if body.outcome.is_valid:
            self._open[body.group_id] = self._open.get(body.group_id, True) and _succeeds(body)

    def closed(self, body: GroupClosed) -> None:
        """Take the end of a training group."""
        self._closed[body.group_id] = self._open.pop(body.group_id, False)
        if len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]

    def untrained(self, group_ids: Iterable[str]) -> None:
        """Count groups of which no token was trained."""
        for group_id in group_ids:
            if self._closed.get(group_id, False):
                self.num_solved += 1
            else:
                self._num_unsolved += 1

    def begin_again(self) -> None:
        """Count anew: a token was trained."""
        self.num_solved = self._num_unsolved = 0


def _succeeds(body: EpisodeSettled) -> bool:
    if body.reports_success:
        return (body.success or 0.0) >= 1.0
    return body.reward >= 1.0
