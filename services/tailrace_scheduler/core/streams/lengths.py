"""Survival statistics of one tag: how long contexts grow and how long tool calls last.

Both are product-limit (Kaplan-Meier) estimates over fixed buckets. What still runs counts as a lower
bound, so the first episodes to finish, which are short, do not make the rest look short.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_BUCKETS = 128  # of contexts, up to the limit
GROWTH = np.array([0, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384]) / 32_768
PRIOR_EPISODES = 32  # taken to reach the context limit while no episode has ended
WAIT_EDGES = 0.25 * 1.35 ** np.arange(33)  # seconds; the last is about an hour
_EDGES: list[float] = WAIT_EDGES.tolist()
REFRESH_EVENTS = 64
REFRESH_S = 5.0
PACE_KEPT = 0.996  # of the sums behind the pace, at each episode
PROMPT_NEW = 0.02  # least weight of a new prompt in the expected one


class Survival:
    """Counts of ended and cut-off lives for each bucket."""

    def __init__(self, num_buckets: int) -> None:
        self.ended = np.zeros(num_buckets)
        self.cut = np.zeros(num_buckets)

    def curve(self, running: FloatArray, prior: float) -> FloatArray:
        """Return S[b], the share that outlives bucket b; `prior` lives reach the last bucket."""
        ended = self.ended.copy()
        ended[-1] += prior
        lives = ended + self.cut + running
        at_risk = np.cumsum(lives[::-1])[::-1]
        return np.cumprod(1.0 - ended / np.maximum(at_risk, 1e-9), dtype=np.float64)


class TagLengths:
    """Expected contexts and waits of the episodes of one tag."""

    def __init__(self, context_limit: int) -> None:
        self.limit = context_limit
        self.width = context_limit / NUM_BUCKETS
        self.num_ended = 0
        self.prompt_tokens = 0.0  # mean of the first prompts; 0: not known
        self._num_prompts = 0
        self.pace_s = 0.0  # seconds for a token of context, waits included; 0: not known
        self._tokens = self._seconds = 0.0
        self._contexts = Survival(NUM_BUCKETS)
        self._waits = Survival(len(WAIT_EDGES))
        self._events, self._refreshed_s = REFRESH_EVENTS, -1e18
        self._peaks = np.zeros((NUM_BUCKETS, len(GROWTH)))
        self._residual: list[float] = []
        self._wait_left: list[float] = [0.0] * len(WAIT_EDGES)
        self._return_price: list[float] = [0.0] * len(WAIT_EDGES)
        self.refresh(np.zeros(NUM_BUCKETS), (), -1e18)

    def bucket(self, context: float) -> int:
        """Return the bucket of a context."""
        return min(int(context / self.width), NUM_BUCKETS - 1)

    def ended(self, context: int, finished: bool) -> None:
        """An episode ended with this context, or was cut off there."""
        counts = self._contexts.ended if finished else self._contexts.cut
        counts[self.bucket(context)] += 1
        self.num_ended += finished
        self._events += 1

    def began(self, prompt_tokens: int) -> None:
        """An episode began with a prompt of so many tokens."""
        self._num_prompts += 1
        weight = max(1.0 / self._num_prompts, PROMPT_NEW)
        self.prompt_tokens += weight * (prompt_tokens - self.prompt_tokens)

    def lived(self, tokens: float, seconds: float) -> None:
        """An episode took `seconds` for `tokens` of context beyond its prompt."""
        if tokens > 0:
            self._tokens = self._tokens * PACE_KEPT + tokens
            self._seconds = self._seconds * PACE_KEPT + seconds
            self.pace_s = self._seconds / self._tokens

    def waited(self, seconds: float, finished: bool = True) -> None:
        """A tool call ended after `seconds`, or was cut off."""
        counts = self._waits.ended if finished else self._waits.cut
        counts[_wait_bucket(seconds)] += 1

    def is_due(self, now_s: float) -> bool:
        """Tell whether enough is new to compute the tables again."""
        return self._events >= REFRESH_EVENTS or (
            self._events > 0 and now_s - self._refreshed_s >= REFRESH_S
        )

    def refresh(self, running: FloatArray, waiting_s: Sequence[float], now_s: float) -> None:
        """Compute the tables; `running` counts live episodes by bucket, `waiting_s` open tool calls."""
        self._events, self._refreshed_s = 0, now_s
        share = self._contexts.curve(running, 1.0 + max(PRIOR_EPISODES - self.num_ended, 0))
        alive = np.concatenate(([1.0], share))  # at the lower edge of each bucket
        alive[-1] = 0.0
        edges = np.arange(NUM_BUCKETS + 1) * self.width
        middle = edges[:-1] + self.width / 2
        here = np.maximum(np.interp(middle, edges, alive), 1e-12)
        later = middle[:, None] + GROWTH[None, :] * self.limit
        self._peaks = later * np.interp(later, edges, alive, right=0.0) / here[:, None]
        area = np.cumsum(alive[::-1])[::-1] * self.width
        self._residual = list((area[1:] / here).clip(0, self.limit))
        self._refresh_waits(waiting_s)

    def _refresh_waits(self, waiting_s: Sequence[float]) -> None:
        running = np.zeros(len(WAIT_EDGES))
        np.add.at(running, np.searchsorted(WAIT_EDGES, waiting_s).clip(0, len(WAIT_EDGES) - 1), 1)
        share = np.concatenate(([1.0], self._waits.curve(running, 0.01)))[:-1]
        lengths = np.diff(WAIT_EDGES, prepend=0.0)
        area = np.cumsum((share * lengths)[::-1])[::-1]
        self._wait_left = list(area / np.maximum(share, 1e-9))
        alive = np.concatenate((share, [0.0]))
        held_s = np.concatenate(([0.0], np.cumsum(share * lengths)))
        until_s = held_s[None, :] - held_s[:, None]  # from each edge to each later one
        returned = alive[:, None] - alive[None, :]
        prices = np.where(returned > 0, until_s / np.maximum(returned, 1e-12), np.inf)
        self._return_price = list(prices.min(axis=1)[:-1])

    def peaks(self, bucket: int) -> FloatArray:
        """Return M[bucket]: the expected live context after each growth of `GROWTH * limit`."""
        return self._peaks[bucket]  # type: ignore[no-any-return]

    @property
    def peak_table(self) -> FloatArray:
        """Return M: [NUM_BUCKETS, growths]."""
        return self._peaks

    def residual(self, context: float) -> float:
        """Return the mean tokens still to come for an episode with this context."""
        return self._residual[self.bucket(context)]

    def wait_left_s(self, waited_s: float) -> float:
        """Return the mean seconds still to wait in a tool call that has lasted `waited_s`."""
        return self._wait_left[_wait_bucket(waited_s)]

    def return_price_s(self, waited_s: float) -> float:
        """Return the seconds of waiting that one return costs, `waited_s` after the call began.

        A few very long calls make the mean rest long although most calls end soon. One who may give
        up at any time waits no longer than it pays: the seconds until the time that he gives up,
        divided by the share of calls that end before, at the time where this is least (Gittins index).
        """
        return self._return_price[_wait_bucket(waited_s)]


def _wait_bucket(seconds: float) -> int:
    return min(bisect_left(_EDGES, seconds), len(_EDGES) - 1)
