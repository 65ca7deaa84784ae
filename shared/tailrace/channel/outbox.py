"""Frames that wait for a slow peer, in order and counted."""

from __future__ import annotations

from collections import deque


class Outbox:
    """Congested from `max_bytes` until half of it has left."""

    __slots__ = ("_frames", "_max_bytes", "congested", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._frames: deque[bytearray] = deque()
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.congested = False

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def first(self) -> bytearray:
        """The frame to send next."""
        return self._frames[0]

    def put(self, frame: bytearray) -> None:
        """Queue a frame."""
        self._frames.append(frame)
        self.num_bytes += len(frame)
        self.congested = self.congested or self.num_bytes >= self._max_bytes

    def pop(self) -> bool:
        """Forget the first frame, which was sent; True when that ended a congestion."""
        self.num_bytes -= len(self._frames.popleft())
        if self.congested and self.num_bytes <= self._max_bytes // 2:
            self.congested = False
            return True
        return False

    def clear(self) -> None:
        """Forget all frames."""
        self._frames.clear()
        self.num_bytes = 0
        self.congested = False
