"""Builds the training rows of groups, with advantages, and counts what was left out.

Left out are rows of invalid members, rows of cut-off episodes if the configuration masks them, and rows
longer than the model reads. Episodes of the latter two are still compared with others. Rows without a
learning signal (by their group, or by a conversation without a reward) are left out too, unless the
loss keeps every token near the reference: then they are trained with advantage 0. If advantages need
values or divergences (`core/step/estimates.py`), rows do not have them yet.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.advantages.base import (
    NO_REWARD,
    Advantages,
    Returns,
    Verdict,
    estimated,
)
from tailrace_learner.core.algorithms.advantages.comparison import (
    NO_COMPARISON,
    ComparisonSet,
    comparison_set,
)
from tailrace_learner.core.algorithms.advantages.shaping import shaped
from tailrace_learner.core.batch.group_returns import (
    NO_LIMITS,
    RowLimits,
    group_returns,
    is_overlong,
    num_unnamed_turns,
)
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.rows import PreparedGroup, Source, Unestimated
from tailrace_learner.core.batch.token_rows import TokenReader
from tailrace_learner.core.step.step_advantages import settled
from tailrace_protos.episode import OVER_BUDGET
from tailrace_protos.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class TrainingRowBuilder:
    """Prepares groups for one step of one lineage."""

    config: LearnerConfig
    max_staleness: int
    ancestry: Ancestry
    limits: RowLimits = NO_LIMITS
    quarantine: Mapping[str, int] = field(default_factory=dict)  # may change between groups
    drops_stale: bool = False  # groups with a token that is too old

    def unknown_versions(
        self, group: TrajectoryGroup, known_versions: Mapping[int, tuple[str, int]]
    ) -> set[int]:
        """Versions of the group's tokens that `known_versions` does not list (yet)."""
        rows = (row for member in group.members for row in member.rows)
        versions = {span.policy_version for row in rows for span in row.spans}
        return {version for version in versions if version >= 0 and version not in known_versions}

    def prepare(
        self, group: TrajectoryGroup, step: int, known_versions: Mapping[int, tuple[str, int]]
    ) -> PreparedGroup:
        """Computes advantages and masks of one group for a learner that has done `step` steps."""
        counts: Counter[str] = Counter()
        returns = shaped(group_returns(group, self.limits, counts), self.config)
        advantages = estimated(returns, self.config)
        played = [i for i in np.flatnonzero(returns.is_valid).tolist() if i != returns.greedy]
        kept = [group.members[index] for index in played]
        counts["num_invalid_episodes"] = len(group.members) - int(returns.is_valid.sum())
        counts[f"num_groups_{advantages.verdict.value}"] = 1
        if self.config.compares_observations:
            counts["num_unnamed_turns"] = num_unnamed_turns(returns)
        teaches = advantages.verdict is Verdict.TRAIN
        reader = TokenReader(
            self.config,
            self.max_staleness,
            self.ancestry,
            step,
            known_versions,
            counts,
            self.quarantine,
        )
        sources: tuple[Source, ...] = ()
        if teaches or self.config.holds_all_tokens:
            sources = tuple(self._sources(group, played, _taught(returns, teaches), reader))
            _leave_uncompared(sources, advantages)
        return PreparedGroup(
            group_id=group.group_id,
            group_index=group.group_index,
            rows=tuple(source.trained for source in sources if source.trained is not None),
            drop_reason=self._drop_reason(advantages.verdict, counts),
            rewards=tuple(member.reward for member in kept),
            successes=tuple(member.success for member in kept if member.success is not None),
            counts=dict(counts),
            tag=group.members[0].task.env_name if group.members else "",
            comparison=self._comparison(returns, played),
            unestimated=self._settle(returns, advantages, sources),
            untrained=self._untrained(group, played, returns, reader),
        )

    def _sources(
        self,
        group: TrajectoryGroup,
        played: Sequence[int],
        taught: Sequence[NDArray[np.int64]],
        reader: TokenReader,
    ) -> Iterator[Source]:
        """Every row of the members that are trained; `taught` G times [R] conversation of each row."""
        for member in played:
            episode = group.members[member]
            if self.config.over_budget_episodes == "mask" and episode.metrics.get(OVER_BUDGET):
                reader.counts["num_masked_episodes"] += 1
                continue
            for index, (row, conversation) in enumerate(zip(episode.rows, taught[member], strict=True)):
                if conversation == NO_REWARD and not self.config.holds_all_tokens:
                    continue
                if is_overlong(row, self.limits):
                    reader.counts["num_overlong_rows"] += 1
                    continue
                row_id = f"{episode.episode_id}/{row.row_id}".rstrip("/")
                whole = reader.whole(row_id, row) if self.config.needs_estimates else None
                trained = reader.trained(row_id, row)
                if trained is not None:
                    trained.conversation = int(conversation)
                yield Source(member, index, whole, trained)

    def _untrained(
        self, group: TrajectoryGroup, played: Sequence[int], returns: Returns, reader: TokenReader
    ) -> tuple[int, ...]:
        """Tokens of each row of a group of equal returns, where they count in the divisor."""
        is_equal = reader.counts[f"num_groups_{Verdict.ZERO_VARIANCE.value}"] > 0
        is_computed = self.config.holds_all_tokens
        if is_computed or not is_equal or self.config.zero_variance_groups != "count":
            return ()
        quiet = replace(reader, counts=Counter())  # nothing is left out of what is not trained
        rows = self._sources(group, played, returns.row_conversations, quiet)
        return tuple(len(row.trained.targets) for row in rows if row.trained is not None)

    def _settle(
        self, returns: Returns, advantages: Advantages, sources: Sequence[Source]
    ) -> Unestimated | None:
        """Writes the advantages into the rows, or returns what they still need."""
        if self.config.needs_estimates:
            return Unestimated(returns, tuple(sources))
        for source in sources:
            if source.trained is not None:
                per_token = advantages.per_token[source.member][source.place]
                source.trained.advantages = settled(per_token[source.trained.targets], self.config)
        return None

    def _comparison(self, returns: Returns, played: Sequence[int]) -> ComparisonSet:
        """Comparison set of the members that are trained, where the whole step is compared."""
        if not self.config.normalises_over_step:
            return NO_COMPARISON
        comparison = comparison_set(returns)
        return comparison.chosen(np.isin(comparison.members, played))

    def _drop_reason(self, verdict: Verdict, counts: Mapping[str, int]) -> str:
        if verdict is Verdict.ZERO_VARIANCE and self.config.zero_variance_groups == "redraw":
            return "zero_variance"
        if counts.get("num_stale_tokens") and self.drops_stale:
            return "stale"
        return ""


def _taught(returns: Returns, teaches: bool) -> tuple[NDArray[np.int64], ...]:
    """Conversation of each row, G times [R]; `NO_REWARD` if the group has no learning signal."""
    places = returns.row_conversations
    return places if teaches else tuple(np.full(len(each), NO_REWARD) for each in places)


def _leave_uncompared(sources: Sequence[Source], advantages: Advantages) -> None:
    """Leaves rows of conversations without a learning signal out of what the whole step compares."""
    if advantages.has_signal is None:
        return
    for source in sources:
        if source.trained is not None and not advantages.has_signal[source.member][source.place]:
            source.trained.conversation = NO_REWARD
