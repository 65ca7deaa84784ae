"""Early ends of groups that hold up the learner (rule F).

A group of age `max_staleness` has to be trained in the present step. While only such groups are left to
wait for, servers run empty. The members with the longest expected rest end first: without the first k
of them the wait shortens to the rest of the next one. The rule ends the k members that save most, if
the engine time saved outweighs the work thrown away. The work is priced the higher, the nearer the
tokens thrown away are to their permitted share. A group that would keep too few valid members is
deferred by a version instead, and its oldest tokens are masked.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tailrace_scheduler.core.streams.ages import Ages
from tailrace_scheduler.core.streams.lengths import TagLengths
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup
from tailrace_scheduler.core.streams.settings import EngineModel, StreamSettings

COST_WEIGHT = (
    7.0  # lost engine seconds that are worth one second of work, while nothing was thrown away
)
DECAY = 0.9  # of the waste account, each step
CHECK_S = 1.0


class EarlyEnds(NamedTuple):
    """Members to end, and groups to defer by a version."""

    members: dict[str, list[int]]  # by group id
    deferred: dict[str, StreamGroup]


class _Unfinished(NamedTuple):
    rest_s: float
    group: StreamGroup
    member: int
    episode: StreamEpisode | None  # None: it has not started


class CloseRule:
    """Account of the engine time lost and the tokens thrown away."""

    def __init__(self, settings: StreamSettings, ages: Ages) -> None:
        self._settings = settings
        self._ages = ages
        self.checked_s = -math.inf
        self._lost_s = 0.0  # engine seconds lost since this version began to block, less those spent
        self._thrown = 0.0  # tokens
        self._trained = 0.0  # tokens

    def next_step(self, trained_tokens: int) -> None:
        """A step finished."""
        self._lost_s = 0.0
        self._thrown *= DECAY
        self._trained = self._trained * DECAY + trained_tokens

    def decide(
        self,
        now_s: float,
        lost_rate: float,
        step_s: float,
        lengths_of: Callable[[str], TagLengths],
    ) -> EarlyEnds:
        """Return what ends now; `lost_rate` is in engine seconds a second (`ServerBook.lost_rate`)."""
        elapsed = min(now_s - self.checked_s, 10.0 * CHECK_S)
        self.checked_s = now_s
        ends = EarlyEnds({}, {})
        if not self._ages.blocked_slots or self._settings.policy not in ("close", "auto"):
            return ends
        self._lost_s += lost_rate * elapsed
        left = [
            _Unfinished(
                _rest_s(group, member, lengths_of(group.tag), step_s, now_s), group, member, one
            )
            for group in self._ages.due(is_open=True)
            for member, one in group.uncut()
            if member not in group.absent or self._settings.policy == "close"
        ]
        left.sort(key=lambda one: (-one.rest_s, one.group.seq, one.member))
        count = len(left)
        if self._settings.policy == "auto":
            count = self._worth_ending(left, lost_rate, now_s)
        for one in left[:count]:
            self._end(ends, one, now_s)
        return ends

    def _worth_ending(self, left: list[_Unfinished], lost_rate: float, now_s: float) -> int:
        """Return the number of members, the longest rest first, whose early end gains most."""
        tried = EarlyEnds({}, {})
        best, best_count, best_cost, work, thrown = 0.0, 0, 0.0, 0.0, self._thrown
        for count, one in enumerate(left, start=1):
            tokens, work_s = self._price(tried, one, now_s)
            thrown, work = thrown + tokens, work + work_s
            unused = 1.0 - thrown / max(self._settings.max_waste * (thrown + self._trained), 1e-9)
            if thrown > 0 and unused <= 0:
                break
            cost = COST_WEIGHT * work / unused
            next_s = left[count].rest_s if count < len(left) else 0.0
            gain = self._lost_s + lost_rate * (left[0].rest_s - next_s) - cost
            if gain > best:
                best, best_count, best_cost = gain, count, cost
        self._lost_s = max(self._lost_s - best_cost, 0.0)
        return best_count

    def _end(self, ends: EarlyEnds, one: _Unfinished, now_s: float) -> None:
        self._thrown += self._price(ends, one, now_s)[0]

    def _price(self, ends: EarlyEnds, one: _Unfinished, now_s: float) -> tuple[float, float]:
        """Add a member to what ends; return the tokens and the work in seconds that it throws away."""
        group, model = one.group, self._settings.engine
        if group.group_id in ends.deferred:
            return 0.0, 0.0
        ended = ends.members.setdefault(group.group_id, [])
        left = group.num_members - len(group.settled | group.cut) - len(ended) - 1
        if group.num_valid + left >= group.min_valid:
            ended.append(one.member)
            return _thrown(model, one.episode, now_s)
        del ends.members[group.group_id]
        ends.deferred[group.group_id] = group
        tokens = group.old_tokens
        context = max((each.context for _, each in group.uncut() if each), default=0.0)
        return tokens, model.work_s(0.0, tokens, tokens * context / 2)


def _thrown(model: EngineModel, episode: StreamEpisode | None, now_s: float) -> tuple[float, float]:
    if episode is None:
        return 0.0, 0.0
    new = episode.running_tokens(now_s)
    context_sum = episode.context_sum + new * (episode.context + new / 2)
    tokens = episode.sampled + new
    return tokens, model.work_s(episode.prefilled, tokens, context_sum)


def _rest_s(group: StreamGroup, member: int, lengths: TagLengths, step_s: float, now_s: float) -> float:
    """Return the expected seconds until a member has ended."""
    episode = group.live.get(member)
    pace_s = lengths.pace_s or step_s
    if episode is None:
        return lengths.residual(lengths.prompt_tokens or group.prompt_tokens) * pace_s
    rest_s = lengths.residual(episode.context + episode.running_tokens(now_s)) * pace_s
    if episode.state == "tool":
        rest_s += lengths.wait_left_s(now_s - episode.since_s)
    return rest_s
