"""Results of recent calls, so that a call that comes again is answered and not run again (pure).

Bounded by age, number and bytes; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict

from tailrace_protos.tool import ToolResult

MAX_AGE_S = 120.0
MAX_RESULTS = 10_000
MAX_BYTES = 64 << 20


class FinishedCalls:
    """Results by call id."""

    def __init__(self, max_results: int = MAX_RESULTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, tuple[float, int, ToolResult]] = OrderedDict()
        self._num_bytes = 0

    def add(self, result: ToolResult, now_s: float) -> None:
        """Keep a result; one that is bigger than all room is not kept."""
        num_bytes = len(result.content) + 256
        if num_bytes > self._max_bytes or result.call_id in self._results:
            return
        self._results[result.call_id] = (now_s, num_bytes, result)
        self._num_bytes += num_bytes
        while self._is_over(now_s):
            _, (_, freed, _) = self._results.popitem(last=False)
            self._num_bytes -= freed

    def get(self, call_id: str) -> ToolResult | None:
        """The result, if it is still kept."""
        found = self._results.get(call_id)
        return found[2] if found else None

    def _is_over(self, now_s: float) -> bool:
        oldest_s = next(iter(self._results.values()))[0] if self._results else now_s
        is_full = len(self._results) > self._max_results or self._num_bytes > self._max_bytes
        return is_full or now_s - oldest_s > MAX_AGE_S
