"""Bounded queue of finished spans, which a thread sends; the receiver may be slow, hang or be gone.

Invariants: `put` never waits: a full queue drops and counts; `close` returns within its limit. A fast
receiver gets everything, also what fills the queue in less than an interval.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tailrace import metrics
from tailrace.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MAX_ITEMS = 4096
MAX_BATCH = 256
_INTERVAL_S = 5.0  # a request costs more than the spans in it
CLOSE_S = 3.0
_CLOSE_FAILING_S = 0.2


class BackgroundQueue(Generic[T]):
    """Sends items in batches; `send` raises one of `errors` for a batch that was not taken."""

    def __init__(
        self,
        name: str,
        send: Callable[[list[T]], None],
        errors: tuple[type[Exception], ...],
        remedy: str,
        max_items: int = MAX_ITEMS,
        close_s: float = CLOSE_S,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self._name = name
        self._send = send
        self._errors = errors
        self._remedy = remedy
        self._max_items = max_items
        self._close_s = close_s
        self._max_batch = max_batch
        self._items: deque[T] = deque()
        self._ending = threading.Event()
        self._due = threading.Event()  # before the interval is over
        self._is_failing = False
        self._num_in_flight = 0
        self._sent, self._dropped, self._failed = (
            metrics.SPANS.labels(name, result) for result in ("sent", "dropped", "failed")
        )
        metrics.QUEUED_SPANS.labels(name).set_function(lambda: len(self._items))
        # A daemon: a receiver that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"{name} spans", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Takes one item, or drops it if the queue is full."""
        num_items = len(self._items)
        if num_items >= self._max_items:
            self.drop()
            return
        self._items.append(item)
        if num_items == self._max_items // 2 and not self._is_failing:
            self._due.set()

    def drop(self) -> None:
        """Counts an item that is left out."""
        self._dropped.inc()

    def close(self) -> None:
        """Sends the rest; what a slow receiver does not take in time is dropped."""
        self._ending.set()
        self._due.set()
        self._thread.join(_CLOSE_FAILING_S if self._is_failing else self._close_s)
        if num_left := len(self._items) + self._num_in_flight:
            self._dropped.inc(num_left)
            log.warning("spans not sent", receiver=self._name, num_spans=num_left, remedy=self._remedy)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._due.wait(_INTERVAL_S)
            self._due.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._items:
            batch = [self._items.popleft() for _ in range(min(self._max_batch, len(self._items)))]
            self._num_in_flight = len(batch)
            try:
                self._send(batch)
            except self._errors as error:
                self._failed.inc(len(batch))
                if not self._is_failing:
                    log.warning(
                        "spans not taken", receiver=self._name, error=str(error), remedy=self._remedy
                    )
                self._is_failing = True
                if self._ending.is_set():
                    return
            else:
                self._sent.inc(len(batch))
                self._is_failing = False
            finally:
                self._num_in_flight = 0
