"""Steps and groups without a trained token: their causes, each with a remedy, and solved tasks (pure).

A step whose tokens are all without a learning signal (advantages of 0) has trained none either: what
else is in the loss, an entropy bonus or a divergence, teaches no task.

The groups of a solved task have equal rewards, as those of one that teaches nothing. A group is solved
if all its valid episodes succeed: the task reported a success of 1, or it reports none and the reward
is at least 1. This is stricter than `Trajectory.success`, for which a reward above 0 is enough:
episodes that all get 0.1, for the form of an answer, solve nothing, and their run is a failure. A group
that is not known counts as unsolved. Nine of ten are enough: a policy that always does the same fails
at a few tasks.
"""

from collections.abc import Iterable, Mapping

from tailrace_protos.event import EpisodeSettled, GroupClosed

SOLVED_SHARE = 0.9
_REMEMBERED = 1 << 16  # groups that the learner has, or may get again after a resume
EQUAL_REWARDS = "zero_variance"
_OF_GROUPS = (
    EQUAL_REWARDS,
    "too_few_valid",
)  # causes of whole groups: named if they are most of a step
_OF_REFERENCE = "num_nonfinite_ref_tokens"

# Reasons for a group without a trained token: the learner's metric or drop reason, and a remedy.
REMEDIES = {
    EQUAL_REWARDS: "all episodes of a group had the same reward: check the reward, choose tasks that "
    "the model solves sometimes, raise group_size or the sampling temperature",
    "too_few_valid": "groups had too few valid episodes: mend the failures, or lower "
    "scheduler.min_valid",
    "stale": "tokens were older than max_staleness: raise max_staleness or lower the number of "
    "concurrent episodes",
    _OF_REFERENCE: "the reference's log-probabilities were not finite: check the weights "
    "of learner.reference, and learner.model_args.dtype",
    "skipped": "loss or gradients were not finite and all updates were skipped: lower "
    "learner.training_args.learning_rate, check learner.model_args.dtype and the rewards",
    "num_stale_tokens": "tokens were older than max_staleness: raise max_staleness",
    "num_nonfinite_rewards": "rewards were not finite, or beyond 1e12: check the reward",
    "num_nonfinite_tokens": "the engine's log-probabilities were not finite: check the model's dtype",
    "num_malformed_episodes": "episodes were malformed: agents and learner must have the same version",
    "num_quarantined_tokens": "inference servers sampled with wrong weights: see learner.max_mismatch",
    "num_overlong_rows": "rows were longer than the model reads: lower agents.max_episode_tokens",
    "num_masked_episodes": "episodes were cut off by a limit and learner.over_budget_episodes masks "
    "them: raise agents.generating_args.max_new_tokens or the limit of turns",
    "num_unrewarded_rows": "conversations were given no reward: see agents.workflow.reward_scope",
}
OTHER_CAUSE = "no token of them could be trained: see the metrics num_* of the steps"


def untrained_cause(metrics: Mapping[str, float | None]) -> str | None:
    """Returns the cause for which a step changed no weight; None if it did, or if that is unknown."""
    num_tokens = metrics.get("num_trained_tokens")
    if num_tokens is None:
        return None
    counts = {name: count or 0.0 for name, count in metrics.items()}
    if num_tokens:
        return EQUAL_REWARDS if metrics.get("num_signal_tokens") == 0 else _skipped_cause(counts)
    return _cause_without_tokens(counts)


def _cause_without_tokens(counts: Mapping[str, float]) -> str:
    """Returns the cause for which a step had no token to train."""
    of_tokens = next((name for name in REMEDIES if counts.get(name)), "")
    of_groups = {name: counts.get(f"num_groups_{name}", 0.0) for name in _OF_GROUPS}
    largest = max(of_groups, key=lambda name: of_groups[name])
    half = counts.get("num_groups", 0.0) / 2
    if of_groups[largest] > half or (of_groups[largest] == half and not of_tokens):
        return largest
    return of_tokens or "other"


def _skipped_cause(counts: Mapping[str, float]) -> str | None:
    """Returns the cause for which all updates of a step were skipped; None if one was applied."""
    if not 0 < counts.get("num_updates", 0.0) <= counts.get("num_skipped_updates", 0.0):
        return None
    return _OF_REFERENCE if counts.get(_OF_REFERENCE) else "skipped"


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
