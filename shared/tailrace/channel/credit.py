"""Credit on a link: how much may be under way to a peer that has not confirmed it.

Without it a slow reader's frames pile up where nobody can wait for them: nats-server closes the
connection of a client that is 64 MiB behind, a socket's buffers only move the problem. Every frame
carries the number of frames taken from the other side, so confirmations mostly cost nothing.
"""

from __future__ import annotations

from collections import deque


class Credit:
    """Both directions of one link. Exhausted from `max_bytes` unconfirmed until half of that."""

    __slots__ = (
        "_max_bytes",
        "_num_confirmed",
        "_owed_bytes",
        "_unconfirmed",
        "exhausted",
        "num_bytes",
        "received",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unconfirmed: deque[int] = deque()  # sizes of frames sent
        self._num_confirmed = 0
        self._owed_bytes = 0  # taken since we last confirmed
        self.num_bytes = 0  # sent and not confirmed
        self.received = 0  # frames taken, which is the sequence number of the next one
        self.exhausted = False

    def on_sent(self, num_bytes: int) -> bool:
        """A frame left, and with it a confirmation; True when that exhausted the credit."""
        self._owed_bytes = 0
        self._unconfirmed.append(num_bytes)
        self.num_bytes += num_bytes
        if self.exhausted or self.num_bytes < self._max_bytes:
            return False
        self.exhausted = True
        return True

    def on_received(self, num_bytes: int, confirmed: int) -> None:
        """Took the next frame, which confirms that the peer has taken `confirmed` of ours."""
        self.received += 1
        self._owed_bytes += num_bytes
        unconfirmed = self._unconfirmed
        while self._num_confirmed < confirmed and unconfirmed:
            self._num_confirmed += 1
            self.num_bytes -= unconfirmed.popleft()
        if self.num_bytes <= self._max_bytes // 2:
            self.exhausted = False

    @property
    def owes_confirmation(self) -> bool:
        """Whether the peer should hear from us even if there is nothing to say."""
        return self._owed_bytes * 4 >= self._max_bytes
