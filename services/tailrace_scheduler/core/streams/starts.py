"""Queue of everything that waits for a server: oldest group first, then arrival.

A group that waits is one entry, whatever its size; a held turn is one of its own.
Entries die in place and are dropped at the head.
"""

import heapq
from collections.abc import Callable

from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup

Waiting = StreamGroup | StreamEpisode


class StartQueue:
    """A heap of groups and held turns."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiting]] = []
        self._arrivals = 0

    def add_group(self, group: StreamGroup) -> None:
        """A group has members to start."""
        self._push(group.seq, group)

    def add_turn(self, episode: StreamEpisode) -> None:
        """A turn of an episode waits for any server; its former entry dies."""
        episode.ticket = self._arrivals
        self._push(episode.group.seq, episode)

    def _push(self, seq: int, waiting: Waiting) -> None:
        heapq.heappush(self._heap, (seq, self._arrivals, waiting))
        self._arrivals += 1

    def head(self, has_members: Callable[[StreamGroup], bool]) -> Waiting | None:
        """Return what is next; it stays the head until it no longer waits."""
        while self._heap:
            _, ticket, waiting = self._heap[0]
            if isinstance(waiting, StreamGroup):
                if waiting.state == "open" and has_members(waiting):
                    return waiting
            elif waiting.state == "held" and waiting.ticket == ticket:
                return waiting
            heapq.heappop(self._heap)
        return None


def next_member(group: StreamGroup) -> int:
    """Return the member of a group that starts next; -1 if all have started."""
    while group.next_member < group.num_members:
        member = group.next_member
        if _waits(group, member):
            return member
        group.next_member += 1
    return -1


def _waits(group: StreamGroup, member: int) -> bool:
    return not (
        member in group.settled or member in group.live or member in group.absent or member in group.cut
    )
