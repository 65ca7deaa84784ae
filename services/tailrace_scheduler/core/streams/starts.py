"""Queue of everything that waits for a server: oldest group first, then arrival.

A group that waits is one entry, whatever its size; a held turn is one of its own. Groups of a phase
that no worker has room for hold up neither the other phase nor held turns, whose workers play already.
Entries die in place and are dropped at the head.
"""

import heapq
from collections.abc import Callable

from tailrace_protos.subjects import Phase
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup

Waiting = StreamGroup | StreamEpisode


class RoomWait:
    """Clock that runs while what is next waits for a server with room, and not for a worker."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since_s: float | None = None  # it runs since then

    def read_s(self, now_s: float) -> float:
        """Return the seconds so far."""
        return self._seconds + (0.0 if self._since_s is None else max(now_s - self._since_s, 0.0))

    def run(self, is_running: bool, now_s: float) -> None:
        """Let it run or stand from now on."""
        self._seconds = self.read_s(now_s)
        self._since_s = now_s if is_running else None


class StartQueue:
    """Heaps of the groups of each phase, and of held turns."""

    def __init__(self) -> None:
        self._groups: dict[Phase, list[tuple[int, int, StreamGroup]]] = {}
        self._turns: list[tuple[int, int, StreamEpisode]] = []
        self._arrivals = 0

    def add_group(self, group: StreamGroup) -> None:
        """A group has members to start."""
        heap = self._groups.setdefault(group.phase, [])
        heapq.heappush(heap, (group.seq, self._arrived(), group))

    def add_turn(self, episode: StreamEpisode) -> None:
        """A turn of an episode waits for any server; its former entry dies."""
        episode.ticket = self._arrived()
        heapq.heappush(self._turns, (episode.group.seq, episode.ticket, episode))

    def _arrived(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1

    def head(self, may_start: Callable[[Phase], bool]) -> Waiting | None:
        """Return what is next, a group only of a phase that may start; it stays the head until it no
        longer waits."""
        heads: list[tuple[int, int, Waiting]] = []
        if turn := self._first_turn():
            heads.append(turn)
        for phase, heap in self._groups.items():
            if may_start(phase) and (group := _first_group(heap)):
                heads.append(group)
        return min(heads, key=lambda one: one[:2])[2] if heads else None

    @property
    def has_groups(self) -> bool:
        """Tell whether a group of any phase waits."""
        return any(_first_group(heap) for heap in self._groups.values())

    def _first_turn(self) -> tuple[int, int, StreamEpisode] | None:
        while self._turns:
            _, ticket, episode = self._turns[0]
            if episode.state == "held" and episode.ticket == ticket:
                return self._turns[0]
            heapq.heappop(self._turns)
        return None


def _first_group(heap: list[tuple[int, int, StreamGroup]]) -> tuple[int, int, StreamGroup] | None:
    while heap:
        group = heap[0][2]
        if group.state == "open" and next_member(group) >= 0:
            return heap[0]
        heapq.heappop(heap)
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
