"""The drift sentinel: finds inference servers that sample with other weights than they report.

A server is judged once enough of its tokens were read, over several mini-batches and steps, or once
the errors of fewer are beyond the limit whatever the others add. Until then it is trusted.
"""

import math
from dataclasses import dataclass, field

from tailrace_learner.core.mismatch.drift import DRIFT, Sums
from tailrace_protos.control import split_source
from tailrace_protos.event import ServerQuarantined

TOKENS = "drift_tokens/"


@dataclass(slots=True)
class _Reading:
    """Errors of a server, or of a source's tokens of one version."""

    error: float = 0.0
    num_tokens: float = 0.0

    def add(self, error: float, num_tokens: float) -> None:
        self.error += error
        self.num_tokens += num_tokens

    @property
    def mean(self) -> float:
        return self.error / self.num_tokens


@dataclass(slots=True)
class _Pool:
    """Readings of a source since its last verdict, by the step of the version."""

    readings: dict[int, _Reading] = field(default_factory=dict)

    def add(self, version_step: int, error: float, num_tokens: float) -> None:
        self.readings.setdefault(version_step, _Reading()).add(error, num_tokens)

    @property
    def num_tokens(self) -> float:
        return sum(reading.num_tokens for reading in self.readings.values())

    @property
    def error(self) -> float:
        return sum(reading.error for reading in self.readings.values())

    @property
    def mean(self) -> float:
        return self.error / self.num_tokens

    def newest_within(self, limit: float) -> int:
        """Newest version within the limit, of a pool whose mean is within it."""
        steps = [step for step, reading in self.readings.items() if reading.mean <= limit]
        return max(steps, default=min(self.readings))  # none: only rounding is between

    def oldest_beyond(self, limit: float) -> int:
        """Oldest version beyond the limit, of a pool whose mean is beyond it."""
        steps = [step for step, reading in self.readings.items() if reading.mean > limit]
        return min(steps, default=min(self.readings))


class Sentinel:
    """Judges sources: `begin` a step, `read` every mini-batch of it, then `numbers` for its metrics.

    `quarantine` is live: source -> step of its last good reading, the newest version that is trusted.
    Over several ranks each has its own sentinel, which reads the same sums and so reaches the same
    verdicts.
    """

    def __init__(self, max_mismatch: float | None, min_tokens: int) -> None:
        self.quarantine: dict[str, int] = {}
        self.found: list[ServerQuarantined] = []  # in this step
        self._limit = math.inf if max_mismatch is None else max_mismatch
        self._min_tokens = min_tokens
        self._step = -1
        self._open: dict[str, _Pool] = {}  # since the last verdict, of all steps
        self._told: dict[str, _Reading] = {}  # by server id, in this step
        self._good: dict[str, int] = {}  # source -> newest version over which it was good
        self._within: dict[str, int] = {}  # the same, of the readings of this step
        self._beyond: set[str] = set()  # and those beyond the limit without a fault of theirs
        self._judged: set[str] = set()  # sources that had a verdict in this step
        self._restarted: set[str] = set()  # server ids that were started anew and never good before

    def begin(self, step: int) -> None:
        """Begins a step on the weights of `step`.

        Only now are the sources of the last step good: others of the same version may have gone wrong
        after a good reading.
        """
        for source in self._within.keys() - self.quarantine.keys():
            self._good[source] = max(self._within[source], self._good.get(source, -1))
        self._step = step
        self.found = []
        self._told, self._within, self._beyond = {}, {}, set()
        self._judged = set()

    def num_owed(self, source: str) -> int:
        """Tokens that the source's next verdict still needs; 0 if it had one in this step."""
        if source in self.quarantine or source in self._judged:
            return 0
        pool = self._open.get(source)
        return math.ceil(self._min_tokens - (pool.num_tokens if pool else 0))

    def read(self, sums: Sums) -> list[ServerQuarantined]:
        """Judges by a mini-batch's sums of errors and numbers of tokens; returns the newly found.

        Sums are pooled over mini-batches and steps until the verdict is certain. Where every one of
        several sources is beyond the limit, or a new start of a server changed nothing and no other
        was ever good, none is quarantined: dtypes or temperatures differ, and no server is wrong.
        """
        pooled = self._pooled(sums)
        beyond = {source for source, pool in pooled.items() if pool.mean > self._limit}
        ripe = {source for source, pool in pooled.items() if self._is_ripe(pool)}
        for source in ripe:
            del self._open[source]
        self._judged |= ripe
        for source in ripe - beyond:
            newest = pooled[source].newest_within(self._limit)
            self._within[source] = max(newest, self._within.get(source, -1))
        suspects = [source for source in pooled if source in ripe & beyond - self.quarantine.keys()]
        is_shared = len(beyond) == len(pooled) > 1
        blamed = [source for source in suspects if not is_shared and self._is_to_blame(source)]
        self._beyond.update(set(suspects).difference(blamed))
        found = [self._quarantine(source, pooled[source]) for source in blamed]
        self.found += found
        return found

    def numbers(self) -> dict[str, float | None]:
        """Errors of the step by server id, and the number of servers that differ without a fault."""
        told: dict[str, float | None] = {}
        for server_id, reading in self._told.items():
            told[DRIFT + server_id] = reading.mean
            told[TOKENS + server_id] = reading.num_tokens
        if self._beyond:
            told["num_servers_beyond_mismatch"] = float(len(self._beyond))
        return told

    def _is_ripe(self, pool: _Pool) -> bool:
        """Tells whether more tokens could not change the verdict, or there are enough."""
        return pool.num_tokens >= self._min_tokens or pool.error > self._limit * self._min_tokens

    def _is_to_blame(self, source: str) -> bool:
        """Tells whether a new start may help: not if one did not and no server was ever good."""
        server_id = split_source(source)[0]
        good = self._good.keys() | self._within
        is_shown = any(source == one or split_source(one)[0] != server_id for one in good)
        return is_shown or server_id not in self._restarted

    def _pooled(self, sums: Sums) -> dict[str, _Pool]:
        """Readings since their last verdict of the sources in `sums`."""
        pooled = {}
        for (source, age), (error, num_tokens) in sums.items():
            if _is_known(error, num_tokens):
                self._told.setdefault(split_source(source)[0], _Reading()).add(error, num_tokens)
                pooled[source] = self._open.setdefault(source, _Pool())
                pooled[source].add(self._step - age, error, num_tokens)
        return pooled

    def _quarantine(self, source: str, pool: _Pool) -> ServerQuarantined:
        """Trusts no version beyond the limit, nor later ones, whatever was read before."""
        good_step = min(self._good.get(source, -1), pool.oldest_beyond(self._limit) - 1)
        self.quarantine[source] = good_step
        server_id, incarnation = split_source(source)
        if source not in self._good:
            self._restarted.add(server_id)
        return ServerQuarantined(
            server_id=server_id,
            incarnation=incarnation,
            mismatch=pool.mean,
            max_mismatch=self._limit,
            num_tokens=int(pool.num_tokens),
            step=self._step,
            good_step=good_step,
        )


def _is_known(error: float, num_tokens: float) -> bool:
    return num_tokens > 0 and not math.isnan(error)
