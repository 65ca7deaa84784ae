"""The drift sentinel: does every inference server sample from the weights that it says it has?

On tokens of exactly the learner's version, engine and learner computed one log-probability with the
same weights; what is between them is arithmetic (float32 1e-6, bfloat16 1e-2) or a server that has
gone wrong. The error is the mean of |log pi - log mu| and not the divergence: a few tokens do not
outweigh all others, it is linear in what is wrong, and one can say how much is normal.

Tokens of other versions say nothing about a server and are not read. A server of whose tokens too few
match is read once enough have come, over several mini-batches and steps; until then it is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.rows import Row
from tailrace_protos.control import split_source
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.trajectory import ServerSpan

DRIFT = "drift/"
TOKENS = "drift_tokens/"


def drift_sums(
    rows: Sequence[Row], errors: Tensor, is_current: NDArray[np.bool_]
) -> Iterator[tuple[str, Tensor, int]]:
    """Per source, the sum of `errors` [M] over its version-matched tokens, and their number."""
    names, owners = _owners(rows)
    if not names or not is_current.any():
        return
    counted = is_current & (owners >= 0)
    counts = np.bincount(owners[counted], minlength=len(names))
    places = torch.from_numpy(owners[counted]).to(errors.device)
    read = errors[torch.from_numpy(np.flatnonzero(counted)).to(errors.device)].double()
    sums = torch.zeros(len(names), dtype=torch.float64, device=errors.device)
    sums.index_add_(0, places, read)
    for place, name in enumerate(names):
        if counts[place]:
            yield name, sums[place], int(counts[place])


def per_token(spans: Sequence[ServerSpan], num_tokens: int, names: list[str]) -> NDArray[np.int64]:
    """Place in `names` [num_tokens] of each token's source, -1 where none is known; adds to `names`."""
    if sum(span.num_tokens for span in spans) != num_tokens:
        return np.full(num_tokens, -1, np.int64)
    places = []
    for source in (span.source for span in spans):
        if source and source not in names:
            names.append(source)
        places.append(names.index(source) if source else -1)
    return np.repeat(np.array(places, np.int64), [span.num_tokens for span in spans])


def _owners(rows: Sequence[Row]) -> tuple[list[str], NDArray[np.int64]]:
    """All sources of the rows, and for every target [M] which of them sampled it."""
    names: list[str] = []
    owners = [per_token(row.server_spans, len(row.targets), names) for row in rows]
    return names, np.concatenate(owners)


def spans_of(owners: NDArray[np.int64], names: Sequence[str]) -> tuple[ServerSpan, ...]:
    """What `per_token` made, as spans again."""
    starts = np.flatnonzero(np.diff(owners, prepend=-2))
    counts = np.diff(starts, append=len(owners))
    return tuple(
        ServerSpan(names[owner] if owner >= 0 else "", int(count))
        for owner, count in zip(owners[starts], counts, strict=True)
    )


@dataclass(slots=True)
class _Reading:
    """Errors of one source or server."""

    error: float = 0.0
    num_tokens: float = 0.0

    def add(self, error: float, num_tokens: float) -> None:
        self.error += error
        self.num_tokens += num_tokens

    @property
    def mean(self) -> float:
        return self.error / self.num_tokens


class Sentinel:
    """Judges sources: `begin` a step, `read` every mini-batch of it, then `numbers` for its metrics.

    `quarantine` is live: source -> step of its last good reading. Over several ranks each has its own
    sentinel, which reads the same sums and so comes to the same verdicts.
    """

    def __init__(self, max_mismatch: float | None, min_tokens: int) -> None:
        self.quarantine: dict[str, int] = {}
        self.found: list[ServerQuarantined] = []  # in this step
        self._max_mismatch = max_mismatch
        self._min_tokens = min_tokens
        self._step = -1
        self._open: dict[str, _Reading] = {}  # since the last verdict, of all steps
        self._told: dict[str, _Reading] = {}  # by server id, in this step
        self._good: dict[str, int] = {}  # source -> last step over which it was good
        self._within: set[str] = set()  # sources with a good reading in this step
        self._beyond: set[str] = set()  # and those beyond the limit without being to blame
        self._restarted: set[str] = set()  # server ids that were started anew and never good before

    def begin(self, step: int) -> None:
        """A step on the weights of `step` begins.

        Only now are the sources of the last one good: those of the same version may have gone wrong
        after a good reading.
        """
        self._good.update(dict.fromkeys(self._within - self.quarantine.keys(), self._step))
        self._step = step
        self.found = []
        self._told, self._within, self._beyond = {}, set(), set()

    def read(self, sums: Mapping[str, tuple[float, float]]) -> list[ServerQuarantined]:
        """Judge by a mini-batch's sums of errors and numbers of tokens per source; the newly found.

        Sums are pooled over mini-batches and steps until there are enough tokens for a verdict. Where
        every one of several sources is beyond the limit, or a new start of a server changed nothing and
        no other was ever good, none is quarantined: not the servers are wrong, but dtypes or
        temperatures differ.
        """
        pooled = {
            source: self._add(source, *sums[source]) for source in sums if _is_known(*sums[source])
        }
        limit = self._max_mismatch
        if limit is None:
            return []
        beyond = {source for source, reading in pooled.items() if reading.mean > limit}
        ripe = {source for source, reading in pooled.items() if reading.num_tokens >= self._min_tokens}
        for source in ripe:
            del self._open[source]
        self._within |= ripe - beyond
        suspects = [source for source in pooled if source in ripe & beyond - self.quarantine.keys()]
        is_shared = len(beyond) == len(pooled) > 1
        blamed = [source for source in suspects if not is_shared and self._is_to_blame(source)]
        self._beyond.update(set(suspects).difference(blamed))
        found = [self._quarantine(source, pooled[source], limit) for source in blamed]
        self.found += found
        return found

    def numbers(self) -> dict[str, float | None]:
        """The errors of the step by server id, and how many servers differ without being to blame."""
        told: dict[str, float | None] = {}
        for server_id, reading in self._told.items():
            told[DRIFT + server_id] = reading.mean
            told[TOKENS + server_id] = reading.num_tokens
        if self._beyond:
            told["num_servers_beyond_mismatch"] = float(len(self._beyond))
        return told

    def _is_to_blame(self, source: str) -> bool:
        """Whether a new start may help: it may unless it did not before and no server was ever good."""
        server_id = split_source(source)[0]
        good = self._good.keys() | self._within
        is_shown = any(source == one or split_source(one)[0] != server_id for one in good)
        return is_shown or server_id not in self._restarted

    def _add(self, source: str, error: float, num_tokens: float) -> _Reading:
        """What is known of the source since its last verdict."""
        self._told.setdefault(split_source(source)[0], _Reading()).add(error, num_tokens)
        reading = self._open.setdefault(source, _Reading())
        reading.add(error, num_tokens)
        return reading

    def _quarantine(self, source: str, reading: _Reading, limit: float) -> ServerQuarantined:
        good_step = self.quarantine[source] = self._good.get(source, -1)
        server_id, incarnation = split_source(source)
        if source not in self._good:
            self._restarted.add(server_id)
        return ServerQuarantined(
            server_id=server_id,
            incarnation=incarnation,
            mismatch=reading.mean,
            max_mismatch=limit,
            num_tokens=int(reading.num_tokens),
            step=self._step,
            good_step=good_step,
        )


def _is_known(error: float, num_tokens: float) -> bool:
    return num_tokens > 0 and not math.isnan(error)
