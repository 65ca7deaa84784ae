"""Groups, episodes and servers as the core knows them. Plain records; the rules are elsewhere.

A member that waits has no record: its group's range holds it. So 100,000 waiting episodes of groups of
16 take a few megabytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tailrace_protos.subjects import Phase
from tailrace_scheduler.core.health import CallHistory
from tailrace_scheduler.core.streams.lengths import GROWTH, NUM_BUCKETS, FloatArray, TagLengths
from tailrace_scheduler.core.streams.settings import EngineModel

EpisodeState = Literal["running", "tool", "held"]
GroupState = Literal["open", "ready", "taken"]


@dataclass(slots=True, eq=False)
class StreamGroup:
    """One group between admission and the step that trains it."""

    group_id: str
    seq: int  # order of admission
    tag: str
    prompt_tokens: int  # expected, until the tag's are known
    num_members: int
    min_valid: int
    phase: Phase
    version: int = -1  # optimizer step of its oldest unmasked token; -1: nothing sampled
    state: GroupState = "open"
    cut: set[int] = field(default_factory=set)  # members told to end early
    num_valid: int = 0
    done_tokens: float = 0.0  # sampled by members that ended
    old_tokens: float = 0.0  # sampled before the first step after its first start
    settled: set[int] = field(default_factory=set)
    opened_s: float = 0.0  # by the clock of waits for room
    next_member: int = 0  # first of the range that has not started
    live: dict[int, "StreamEpisode"] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)  # played by a worker not heard of yet

    @property
    def unsettled(self) -> tuple[int, ...]:
        """Members that have not ended."""
        return tuple(one for one in range(self.num_members) if one not in self.settled)

    def uncut(self) -> Iterator[tuple[int, "StreamEpisode | None"]]:
        """Yield the members that have not ended and were not told to, with their episodes."""
        for member in range(self.num_members):
            if member not in self.settled and member not in self.cut:
                yield member, self.live.get(member)

    def episode_id(self, member: int) -> str:
        """Return the id of a member."""
        return f"{self.group_id}.{member}"


@dataclass(slots=True, eq=False)
class StreamEpisode:
    """One started episode."""

    episode_id: str
    group: StreamGroup
    member: int
    lengths: TagLengths
    server: "StreamServer | None" = None
    state: EpisodeState = "running"
    context: float = 0.0
    prefix: float = 0.0  # of its context at the begin of its last tool call: what its server computed
    clock: float = 0.0  # token clock of its server when `context` was true
    bucket: int = -1  # counted in the ledger of its server; -1: not counted
    started_s: float = -1.0  # -1: not known, taken over from a worker
    prompt: float = 0.0  # tokens of its first prompt; expected until its first turn has begun
    has_begun: bool = False
    since_s: float = 0.0  # start of its tool call
    sampled: float = 0.0
    prefilled: float = 0.0
    context_sum: float = 0.0  # of context lengths over sampled tokens
    avoids: str = ""  # server that failed it
    ticket: int = -1  # of its place in the queue; another one there is dead

    def sampled_by(self, now_s: float) -> float:
        """Return the tokens sampled so far, those of its running turn estimated."""
        return self.sampled + self.running_tokens(now_s)

    def running_tokens(self, now_s: float) -> float:
        """Return the tokens that its running turn has probably sampled."""
        if self.server is None or self.clock == math.inf:
            return 0.0
        new = max(self.server.tokens_at(now_s) - self.clock, 0.0)
        return min(new, max(self.lengths.limit - self.context, 0.0))


@dataclass(slots=True, eq=False)
class StreamServer:
    """One inference server: what it reported, what it was given, and the rules' state about it."""

    server_id: str
    model: EngineModel
    incarnation: str = ""
    calls: CallHistory = field(default_factory=CallHistory)
    leaving: bool = False
    gone: bool = False
    barred: bool = False  # gets nothing new for now
    policy_version: int = -1
    releases_prefixes: bool = False
    episodes: dict[str, StreamEpisode] = field(default_factory=dict)  # with a place here
    counts: dict[str, FloatArray] = field(default_factory=dict)  # tag -> episodes by bucket
    peak: FloatArray = field(default_factory=lambda: np.zeros(len(GROWTH)))  # F
    num_live: int = 0  # episodes counted in `peak`
    clock: float = 0.0  # tokens that a request decoded here since the start
    clock_s: float = 0.0  # time of `clock`
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    raw_speed: float = 1.0  # predicted / measured step time: model seconds in one of its own
    measured_s: float = -math.inf  # when that was last measured
    speed: float = 1.0  # relative to the median server
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0  # since the report before the last
    kv_used: int = 0
    theta: float = 0.95
    recompute_share: float = 0.0
    recomputed: int = 0  # since the last trim
    trimmed_s: float = -1e18
    lowered_s: float = -1e18
    raised_s: float = -1e18
    refused: bool = False  # a start since the last trim
    stamp: int = 0  # of its newest entry in the heap of open servers
    probed_s: float = -1e18
    advanced_s: float = -1e18

    @property
    def max_peak(self) -> float:
        """Return the expected peak of live contexts, in tokens."""
        return float(self.peak.max())

    @property
    def is_usable(self) -> bool:
        """Tell whether it may get episodes."""
        return not (self.gone or self.leaving or self.barred or self.calls.on_probation)

    def count_of(self, tag: str) -> FloatArray:
        """Return the histogram of live contexts of a tag."""
        found = self.counts.get(tag)
        if found is None:
            found = self.counts[tag] = np.zeros(NUM_BUCKETS)
        return found

    def tokens_at(self, now_s: float) -> float:
        """Return the token clock at a time."""
        return self.clock + max(now_s - self.clock_s, 0.0) * self.tokens_per_s
