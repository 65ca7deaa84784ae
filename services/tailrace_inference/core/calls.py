"""Counts, stop strings and version spans of calls, for engines of other packages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailrace_inference.engine.stops import StopStrings
from tailrace_protos.generation import TokenSpan


@dataclass(slots=True)
class CallCounts:
    """Counters of an engine since its start."""

    generated: int = 0
    prompt: int = 0
    prefix_hit: int = 0
    recomputed: int = 0
    stale: int = 0  # sampled over keys and values of an older version
    preempted: int = 0
    preempted_tokens: int = 0  # computed again after a preemption
    finished: int = 0
    nonfinite: int = 0

    @property
    def computed(self) -> int:
        """Forward tokens of any kind."""
        return self.prompt - self.prefix_hit + self.generated + self.recomputed


def find_stop(
    stops: StopStrings | None, ids: Sequence[int], is_stop_id: bool
) -> tuple[int, str | None]:
    """Number of new tokens that belong to the answer, and the stop string that ends it.

    `is_stop_id`: the last one is a stop id, which wins over a string that ends with it.
    """
    for place, token in enumerate(ids, 1) if stops is not None else ():
        assert stops is not None
        found = stops.push(token)
        if found is not None:
            return place, None if is_stop_id and place == len(ids) else found
    return len(ids), None


def version_spans(versions: Iterable[tuple[int, int]], first: int, count: int) -> tuple[TokenSpan, ...]:
    """Versions of the tokens `first` to `first + count` of an answer.

    `versions`: policy versions of the answer and the first token of each, ascending.
    """
    if not count:
        return ()
    tagged, end = list(versions), first + count
    bounds = [*(start for _, start in tagged[1:]), end]
    spans = []
    for (policy_version, start), bound in zip(tagged, bounds, strict=True):
        if (size := min(bound, end) - max(start, first)) > 0:
            spans.append(TokenSpan(policy_version, "", size))
    return tuple(spans)
