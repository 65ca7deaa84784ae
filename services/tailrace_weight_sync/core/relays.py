"""Plans from which holder a server fetches a version: a tree over the servers, for each part of it.

A buffer travels in `NUM_STRIPES` parts, each along its own tree. A server passes on one part, to as
many servers as there are parts, and only receives the others: so it sends as many bytes as it receives,
and the depth of a tree is the logarithm of the number of servers. Chunks are passed on as they arrive:
a level costs the time of a chunk, not that of the version. On each host the first server fetches over
the network, and the others from those before them.

Invariants: no server is above itself in a tree; a holder that failed is not named again for this buffer
until it holds all of it; weight_sync itself (`ROOT`) is always a holder, so that every server has one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from tailrace_protos.weights import WeightSource

NUM_STRIPES = 2
ROOT = ""
_LOCAL_STREAMS = 8  # to servers of the same host, whose link is memory
_LOOPBACK = ("tcp://127.0.0.1:", "tcp://localhost:")


class Joiner(NamedTuple):
    """A server that fetches, with its address for others."""

    server_id: str
    relay: WeightSource


class _Holder:
    """A server in the trees of one buffer."""

    def __init__(self, joiner: Joiner, role: int) -> None:
        self.joiner = joiner
        self.role = role  # the part that it passes on
        self.is_reachable = not joiner.relay.zmq_endpoint.startswith(_LOOPBACK)  # from other hosts
        self.parents: list[str | None] = [None] * NUM_STRIPES
        self.streams = [0] * NUM_STRIPES  # over the network, by part
        self.num_local = 0
        self.is_whole = False
        self.failed = False

    def has_room(self, stripe: int) -> bool:
        """Says whether its link has room for one more server that fetches this part."""
        if not self.is_reachable or self.failed:
            return False
        if self.is_whole:
            return self.streams[stripe] == 0
        return stripe == self.role and self.streams[stripe] < NUM_STRIPES


class RelayTree:
    """Trees of one buffer."""

    def __init__(self) -> None:
        root = _Holder(Joiner(ROOT, WeightSource("", "", "")), 0)
        root.is_whole = True
        self._holders = {ROOT: root}
        self._by_host: dict[str, list[str]] = {}
        self._order = count()  # of offers, between those of one depth
        self._roles = count()
        self._free: list[list[tuple[int, int, str]]] = [[(0, -1, ROOT)] for _ in range(NUM_STRIPES)]

    def plan(self, joiners: Iterable[Joiner]) -> None:
        """Places servers that begin at the same time; those that are in the trees already stay."""
        placed = [self._add(joiner) for joiner in joiners if not self._is_known(joiner)]
        first = [holder for holder in placed if self._is_first_of_host(holder)]
        for stripe in range(NUM_STRIPES):  # those that pass it on make room for the others
            for holder in (each for each in first if each.role == stripe):
                self._attach(holder, stripe)
        for holder in (*first, *placed):
            for stripe in range(NUM_STRIPES):
                if holder.parents[stripe] is None:
                    self._attach(holder, stripe)

    def parent(self, server_id: str, stripe: int, failed: str = ROOT) -> str:
        """The holder of a planned server; another one than `failed`, which sends it nothing."""
        holder = self._holders[server_id]
        if failed != ROOT and failed in self._holders:
            self._holders[failed].failed = True
        named = holder.parents[stripe]
        if named is None or named not in self._holders or self._holders[named].failed:
            named = self._attach(holder, stripe)
        return named

    def finished(self, joiner: Joiner) -> None:
        """Records that a server holds all bytes: its holders have room again, and it serves anyone."""
        if not self._is_known(joiner):
            self._add(joiner)
        holder = self._holders[joiner.server_id]
        holder.is_whole, holder.failed = True, False
        for stripe in range(NUM_STRIPES):
            self._detach(holder, stripe)
            self._offer(holder, stripe)

    def leave(self, server_id: str) -> None:
        """Removes a server; those that fetch from it ask again."""
        holder = self._holders.pop(server_id, None)
        if holder is None:
            return
        self._by_host[holder.joiner.relay.host_id].remove(server_id)
        for stripe in range(NUM_STRIPES):
            self._detach(holder, stripe)
            for other in self._holders.values():
                if other.parents[stripe] == server_id:
                    other.parents[stripe] = None

    def knows(self, joiner: Joiner) -> bool:
        """Says whether this start of a server is in the trees."""
        known = self._holders.get(joiner.server_id)
        return known is not None and known.joiner == joiner

    def source_of(self, server_id: str) -> WeightSource:
        """Address of a holder that is a server."""
        return self._holders[server_id].joiner.relay

    def depth(self, server_id: str, stripe: int) -> int:
        """Holders from a server up to a whole one, itself included."""
        levels = 0
        while server_id in self._holders and not self._holders[server_id].is_whole:
            levels += 1
            server_id = self._holders[server_id].parents[stripe] or ROOT
        return levels

    def _is_known(self, joiner: Joiner) -> bool:
        if joiner.server_id in self._holders and not self.knows(joiner):  # it was started anew
            self.leave(joiner.server_id)
        return joiner.server_id in self._holders

    def _add(self, joiner: Joiner) -> _Holder:
        role = next(self._roles) % NUM_STRIPES
        holder = self._holders[joiner.server_id] = _Holder(joiner, role)
        self._by_host.setdefault(joiner.relay.host_id, []).append(joiner.server_id)
        return holder

    def _attach(self, holder: _Holder, stripe: int) -> str:
        self._detach(holder, stripe)
        named = self._local_parent(holder, stripe) or self._remote_parent(holder, stripe)
        holder.parents[stripe] = named
        parent = self._holders[named]
        if _is_local(holder, parent):
            parent.num_local += 1
        else:
            parent.streams[stripe] += 1
        self._offer(holder, stripe)
        return named

    def _detach(self, holder: _Holder, stripe: int) -> None:
        named, holder.parents[stripe] = holder.parents[stripe], None
        parent = self._holders.get(named) if named is not None else None
        if parent is None:
            return
        if _is_local(holder, parent):
            parent.num_local -= 1
        else:
            parent.streams[stripe] -= 1
            self._offer(parent, stripe)

    def _offer(self, holder: _Holder, stripe: int) -> None:
        if holder.has_room(stripe):
            server_id = holder.joiner.server_id
            entry = (self.depth(server_id, stripe), next(self._order), server_id)
            heapq.heappush(self._free[stripe], entry)

    def _is_first_of_host(self, holder: _Holder) -> bool:
        return next(self._before(holder), None) is None

    def _before(self, holder: _Holder) -> Iterator[_Holder]:
        """Usable holders of the same host that came earlier."""
        for server_id in self._by_host[holder.joiner.relay.host_id]:
            if server_id == holder.joiner.server_id:
                return
            if not self._holders[server_id].failed:
                yield self._holders[server_id]

    def _local_parent(self, holder: _Holder, stripe: int) -> str | None:
        usable = [
            (other.num_local, at, other.joiner.server_id)
            for at, other in enumerate(self._before(holder))
            if other.num_local < _LOCAL_STREAMS and self._may_feed(other, holder, stripe)
        ]
        return min(usable)[2] if usable else None

    def _remote_parent(self, holder: _Holder, stripe: int) -> str:
        """Of the holders with room that nearest to a whole one, else the least busy."""
        free, passed = self._free[stripe], []
        found: str | None = None
        while free and found is None:
            entry = heapq.heappop(free)
            other = self._holders.get(entry[2])
            if other is not None and other.has_room(stripe):
                passed.append(entry)
                found = entry[2] if self._may_feed(other, holder, stripe) else None
        for entry in passed:
            heapq.heappush(free, entry)
        return found if found is not None else self._least_busy(holder, stripe)

    def _least_busy(self, holder: _Holder, stripe: int) -> str:
        usable = [
            (sum(other.streams), at, server_id)
            for at, (server_id, other) in enumerate(self._holders.items())
            if other.is_reachable and self._may_feed(other, holder, stripe)
        ]
        return min(usable)[2]

    def _may_feed(self, other: _Holder, holder: _Holder, stripe: int) -> bool:
        """Says whether `other` gets this part itself, and not by way of `holder`."""
        while not other.is_whole:
            parent = self._holders.get(other.parents[stripe] or "no such server")
            if other is holder or other.failed or (parent is None and other.parents[stripe] != ROOT):
                return False
            other = self._holders[other.parents[stripe] or ROOT]
        return other is not holder and not other.failed


def _is_local(holder: _Holder, parent: _Holder) -> bool:
    return (
        parent.joiner.server_id != ROOT and parent.joiner.relay.host_id == holder.joiner.relay.host_id
    )
