"""The drift sentinel: does every inference server sample from the weights that it says it has?

On tokens of exactly the learner's version, engine and learner computed one log-probability with the
same weights; what is between them is arithmetic (float32 1e-6, bfloat16 1e-2) or a server that has
gone wrong. The error is the mean of |log pi - log mu| and not the divergence: a few tokens do not
outweigh all others, it is linear in what is wrong, and one can say how much is normal.

Tokens of other versions say nothing about a server and are not read. A server of whose tokens too few
match in one step is read once enough have come; until then it is trusted as before.
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


@dataclass(slots=True)
class _Reading:
    """What was measured of one source and not judged yet."""

    error: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        return self.error / self.num_tokens


class Sentinel:
    """Judges sources step by step. `quarantine` is live: source -> step of its last good reading."""

    def __init__(
        self, max_mismatch: float | None, min_tokens: int, quarantine: Mapping[str, int] | None = None
    ) -> None:
        self.quarantine: dict[str, int] = dict(quarantine or {})
        self._max_mismatch = max_mismatch
        self._min_tokens = min_tokens
        self._open: dict[str, _Reading] = {}
        self._good: dict[str, int] = {}
        self._restarted: set[str] = set()  # server ids that were started anew and never good before

    def read(self, numbers: dict[str, float | None], step: int) -> list[ServerQuarantined]:
        """Judge by a step's numbers, which begin with the weights of `step`; the newly quarantined.

        `numbers` come with sources and are left with server ids. Where every one of several sources is
        beyond the limit, or a new start of a server changed nothing and no other was ever good, none is
        quarantined: not the servers are wrong, but dtypes or temperatures differ.
        """
        found = _taken(numbers)
        _tell(numbers, found)
        if self._max_mismatch is None:
            return []
        ripe = {source: reading for source in found if (reading := self._add(source, found[source]))}
        bad = {one: reading for one, reading in ripe.items() if reading.mean > self._max_mismatch}
        self._good.update(dict.fromkeys(ripe.keys() - bad.keys(), step))
        suspects = [source for source in bad if source not in self.quarantine]
        blamed = (
            [] if len(bad) == len(ripe) > 1 else [one for one in suspects if self._is_to_blame(one)]
        )
        if len(blamed) < len(suspects):
            numbers["num_servers_beyond_mismatch"] = float(len(suspects) - len(blamed))
        return [self._quarantine(source, bad[source], step) for source in blamed]

    def _is_to_blame(self, source: str) -> bool:
        """Whether a new start may help: it may unless it did not before and no server was ever good."""
        server_id = split_source(source)[0]
        is_shown = any(source == one or split_source(one)[0] != server_id for one in self._good)
        return is_shown or server_id not in self._restarted

    def _add(self, source: str, more: _Reading) -> _Reading | None:
        """The source's reading, once there are enough tokens for one."""
        reading = self._open.setdefault(source, _Reading())
        reading.error += more.error
        reading.num_tokens += more.num_tokens
        return self._open.pop(source) if reading.num_tokens >= self._min_tokens else None

    def _quarantine(self, source: str, reading: _Reading, step: int) -> ServerQuarantined:
        good_step = self.quarantine[source] = self._good.get(source, -1)
        server_id, incarnation = split_source(source)
        if source not in self._good:
            self._restarted.add(server_id)
        return ServerQuarantined(
            server_id=server_id,
            incarnation=incarnation,
            mismatch=reading.mean,
            max_mismatch=self._max_mismatch or 0.0,
            num_tokens=reading.num_tokens,
            step=step,
            good_step=good_step,
        )


def _taken(numbers: dict[str, float | None]) -> dict[str, _Reading]:
    """Take the sources' sums out of a step's numbers; what is no number is left out."""
    found: dict[str, _Reading] = {}
    for name in [name for name in numbers if name.startswith(DRIFT)]:
        source, mean = name.removeprefix(DRIFT), numbers.pop(name)
        num_tokens = int(numbers.pop(TOKENS + source) or 0)
        if mean is not None and not math.isnan(mean) and num_tokens:
            found[source] = _Reading(mean * num_tokens, num_tokens)
    return found


def _tell(numbers: dict[str, float | None], found: Mapping[str, _Reading]) -> None:
    """Put the errors into the numbers, by server id."""
    by_server: dict[str, _Reading] = {}
    for source, reading in found.items():
        total = by_server.setdefault(split_source(source)[0], _Reading())
        total.error += reading.error
        total.num_tokens += reading.num_tokens
    for server_id, total in by_server.items():
        numbers[DRIFT + server_id] = total.mean
        numbers[TOKENS + server_id] = float(total.num_tokens)
