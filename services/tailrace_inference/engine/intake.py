"""Requests, aborts and releases on their way into an engine that steps.

Invariants: `submit`, `abort` and `release` may run in other threads than the steps; a request is
checked in a step, and a wrong one gets one chunk with the error.
"""

import time
from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer

from tailrace_inference.core.requests import InvalidRequestError, failed, refused
from tailrace_inference.engine.batch import Batch, EngineCall
from tailrace_inference.engine.emitter import Emitter
from tailrace_inference.engine.guided import Guides
from tailrace_inference.engine.request import make_call
from tailrace_inference.ports import OnChunk
from tailrace_protos.generation import CallErrorCode, GenerateRequest

_RETRY_AFTER_S = 0.5


class Intake:
    """Inbox of one engine. `waiting`: checked calls without a row, first come first served."""

    def __init__(self, max_waiting: int, vocab_size: int, tokenizer: Tokenizer | None) -> None:
        self._max_waiting = max_waiting
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._guides: Guides | None = None
        self._inbox: deque[tuple[GenerateRequest, OnChunk, float]] = deque()
        self._aborts: deque[str | None] = deque()
        self._released: deque[str] = deque()  # episodes
        self.waiting: deque[EngineCall] = deque()

    @property
    def num_waiting(self) -> int:
        """Calls without a row."""
        return len(self._inbox) + len(self.waiting)

    @property
    def has_aborts(self) -> bool:
        """True if aborts are not read yet."""
        return bool(self._aborts)

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `SteppedEngine`."""
        if self.num_waiting >= self._max_waiting:
            reason = f"{self.num_waiting} requests are waiting"
            on_chunk(failed(request.call_id, CallErrorCode.OVERLOADED, reason, _RETRY_AFTER_S))
            return
        self._inbox.append((request, on_chunk, time.perf_counter()))

    def abort(self, call_id: str | None) -> None:
        """Ends a call at the next step; None: all calls."""
        self._aborts.append(call_id)

    def release(self, episode_ids: Sequence[str]) -> None:
        """Frees the kept contexts of these episodes at the next step."""
        self._released.extend(episode_ids)

    def take_released(self) -> list[str]:
        """Returns the episodes whose contexts are to be freed."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def read(self, max_len: int) -> None:
        """Moves requests of at most `max_len` tokens from the inbox to `waiting`."""
        while self._inbox:
            request, on_chunk, submitted_s = self._inbox.popleft()
            try:
                call = make_call(
                    request,
                    on_chunk,
                    max_len,
                    self._vocab_size,
                    self._tokenizer,
                    self._guides_of(request),
                )
            except InvalidRequestError as error:
                on_chunk(refused(request.call_id, error))
                continue
            call.submitted_s = submitted_s
            self.waiting.append(call)

    def _guides_of(self, request: GenerateRequest) -> Guides | None:
        """Made for the first guided request: it reads the whole vocabulary."""
        if request.guide is None or self._tokenizer is None:
            return None
        if self._guides is None:
            self._guides = Guides(self._tokenizer, self._vocab_size)
        return self._guides

    def take_aborts(self) -> set[str | None]:
        """Returns the calls to abort; None in it: all. Those calls came before: `read` finds them."""
        return {self._aborts.popleft() for _ in range(len(self._aborts))}

    def end(self, asked: set[str | None], batch: Batch, emitter: Emitter) -> list[int]:
        """Ends those of the calls `asked` that wait; returns the rows of those that run."""
        if not asked:
            return []
        for call in [each for each in self.waiting if None in asked or each.call_id in asked]:
            self.waiting.remove(call)
            emitter.close_waiting(call)
        running = batch.active().tolist()
        return [row for row in running if None in asked or batch.call(row).call_id in asked]
