"""Order in which vLLM's scheduler computes contexts again after an update of the weights.

vLLM preempts all running requests and computes their contexts in one step, if it has room, and no call
gets a token meanwhile. Here the shortest context comes first, alone; then steps are small, and calls
that have their context again get a token in each. The same tokens are computed as in one step.
"""

from collections import deque
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from tailrace_inference.engine.planner import MAX_RECOMPUTED_TOKENS


class ResumesInTurn:
    """Part of a scheduler class, before vLLM's own in its bases."""

    waiting: Any  # vLLM's queue of requests
    running: list[Any]
    num_spec_tokens: int  # drafts of a running request in a step
    max_num_scheduled_tokens: int  # of a step

    _resumes = False  # since the last update

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *parts: Any, **named: Any
    ) -> bool:
        """Puts the shortest contexts of the requests that it preempts before the others."""
        done: bool = super().reset_prefix_cache(  # type: ignore[misc]
            reset_running_requests, *parts, **named
        )
        queue: Any = self.waiting
        if reset_running_requests and isinstance(self.waiting, deque):  # not by priority
            again = [request for request in queue if _is_preempted(request)]
            queue.remove_requests(again)
            for request in sorted(again, key=lambda each: -int(each.num_tokens)):
                queue.prepend_request(request)
            self._resumes = bool(again)
        return done

    def schedule(self, *parts: Any, **named: Any) -> Any:
        """Schedules a step; vLLM's own takes as many tokens as it may."""
        whole = self.max_num_scheduled_tokens
        try:
            self.max_num_scheduled_tokens = min(whole, self._num_resumed_tokens(whole))
            return super().schedule(*parts, **named)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = whole

    def _num_resumed_tokens(self, whole: int) -> int:
        """Tokens of the next step."""
        head = self.waiting.peek_request() if self._resumes and self.waiting else None
        self._resumes = head is not None and _is_preempted(head)
        if head is None or not self._resumes:
            return whole
        needed = int(head.num_tokens)  # it cannot be cut where prompts are not computed in parts
        if not self.running:
            return needed
        share = MAX_RECOMPUTED_TOKENS.get(current_platform.device_type, MAX_RECOMPUTED_TOKENS["cuda"])
        return len(self.running) * (1 + self.num_spec_tokens) + max(needed, share)


def _is_preempted(request: Any) -> bool:
    return bool(request.status == RequestStatus.PREEMPTED)
