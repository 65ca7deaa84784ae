"""Placement by KV room and predicted step time (rules A to D).

An episode fits on a server while the expected peak of the live contexts there stays within a share
theta of its KV, theta is trimmed by recomputed tokens, and the server would not decode much slower than
one that is half full. Of the servers where it fits, the one with the shortest predicted step gets it.
"""

import heapq
from typing import Protocol

from tailrace_scheduler.core.streams.lengths import TagLengths
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamServer

SLOWEST = 1.5  # times the step of a half-full server
TRIM_S = 5.0
THETA_LEAST, THETA_MOST = 0.3, 0.95
# Share of time that recomputes contexts: above the first a server is given less, below the second more.
# One that keeps the contexts of ended episodes always evicts some of live ones.
RELEASING_SHARES, KEEPING_SHARES = (0.08, 0.06), (0.12, 0.1)
LOWER_EVERY_S, RAISE_EVERY_S = 30.0, 10.0
CACHED = 0.9  # share of what was computed that makes its server worth staying at


class PlacementRule(Protocol):
    """Choice of servers. The core counts every episode in the ledger, whatever the rule."""

    ask_after_s: float

    def choose(self, lengths: TagLengths, context: float, avoid: str) -> StreamServer | None:
        """Return the server for a start or a held turn, or None if it has to wait."""

    def stays(self, episode: StreamEpisode, cached_tokens: int) -> bool:
        """Tell whether the turn that asks stays at the episode's server; -1 tokens: not known."""

    def touched(self, server: StreamServer) -> None:
        """The state of a server changed."""

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """A server reported."""

    def releases(self, episode: StreamEpisode, waited_s: float) -> bool:
        """Tell whether an episode in a tool call gives its place up."""


def fits(server: StreamServer, lengths: TagLengths, context: float) -> bool:
    """Tell whether an episode with this context fits on the server now (rule A)."""
    model = server.model
    if not server.is_usable or server.num_live >= 2 * model.max_running:
        return False
    kv = min(model.kv_tokens, server.max_peak + context)
    slowest = SLOWEST * model.step_s(model.max_running / 2, model.kv_tokens)
    if model.step_s(server.num_live + 1, kv) / server.speed > slowest:
        return False
    if server.num_live == 0:
        return True
    expected = server.peak + lengths.peaks(lengths.bucket(context))
    return float(expected.max()) <= server.theta * model.kv_tokens


def trim(server: StreamServer, now_s: float) -> bool:
    """Adapt the share of KV that a server may be given (rule B); True if it changed."""
    elapsed = now_s - server.trimmed_s
    if elapsed < TRIM_S:
        return False
    if server.trimmed_s >= 0:
        cost = server.model.restore_s if server.model.host_kv_tokens else server.model.e_s
        share = cost * server.recomputed / (elapsed * max(server.raw_speed, 1e-6))
        server.recompute_share += 0.2 * (share - server.recompute_share)
    server.trimmed_s, server.recomputed, refused = now_s, 0, server.refused
    server.refused = False
    too_much, little = RELEASING_SHARES if server.releases_prefixes else KEEPING_SHARES
    changed_s = max(server.lowered_s, server.raised_s)
    if server.recompute_share > too_much and now_s - changed_s >= LOWER_EVERY_S:
        server.theta, server.lowered_s = max(THETA_LEAST, 0.9 * server.theta), now_s
        return True
    if server.recompute_share < little and refused and now_s - changed_s >= RAISE_EVERY_S:
        server.theta, server.raised_s = min(THETA_MOST, server.theta + 0.02), now_s
        return True
    return False


class KvPlacement:
    """The rules, with a heap of the servers that may have room.

    A server that refused is set aside until its state changes, or until a smaller episode asks.
    """

    ask_after_s = 5.0

    def __init__(self, servers: dict[str, StreamServer]) -> None:
        self._servers = servers
        self._open: list[tuple[float, int, str]] = []
        self._aside: list[tuple[float, int, str]] = []  # by the need refused, largest first
        self._dirty: dict[str, StreamServer] = {}
        self._stamps = 0

    def touched(self, server: StreamServer) -> None:
        """Look at a server again before the next choice."""
        self._dirty[server.server_id] = server

    def _look_again(self) -> None:
        for server in self._dirty.values():
            self._stamps += 1
            server.stamp = self._stamps
            if server.is_usable:
                heapq.heappush(self._open, (_step(server), server.stamp, server.server_id))
        self._dirty.clear()
        self._open = self._tidied(self._open)

    def _is_new(self, entry: tuple[float, int, str]) -> bool:
        server = self._servers.get(entry[2])
        return server is not None and server.stamp == entry[1]

    def choose(self, lengths: TagLengths, context: float, avoid: str) -> StreamServer | None:
        """Return the server with the shortest predicted step among those where the episode fits."""
        self._look_again()
        need = float(lengths.peaks(lengths.bucket(context)).max())
        self._bring_back(need)
        found: StreamServer | None = None
        passed = []
        while self._open and found is None:
            entry = heapq.heappop(self._open)
            if not self._is_new(entry):
                continue
            server = self._servers[entry[2]]
            if entry[2] == avoid:
                passed.append(entry)
            elif fits(server, lengths, context):
                found = server
                heapq.heappush(self._open, entry)
            else:
                server.refused = True
                heapq.heappush(self._aside, (-need, *entry[1:]))
        for entry in passed:
            heapq.heappush(self._open, entry)
        self._aside = self._tidied(self._aside)
        return found

    def _bring_back(self, need: float) -> None:
        """Look again at servers that refused a larger episode."""
        while self._aside and -self._aside[0][0] > need:
            entry = heapq.heappop(self._aside)
            if self._is_new(entry):
                server = self._servers[entry[2]]
                heapq.heappush(self._open, (_step(server), *entry[1:]))

    def _tidied(self, heap: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
        """Return a heap without outdated entries once these are the most of it."""
        if len(heap) > 64 + 4 * len(self._servers):
            heap = [one for one in heap if self._is_new(one)]
            heapq.heapify(heap)
        return heap

    def stays(self, episode: StreamEpisode, cached_tokens: int) -> bool:
        """Stay where the place is kept, or there is room, or nearly all of the prefix is cached."""
        server = episode.server
        assert server is not None
        if episode.bucket >= 0:
            return True
        cached = cached_tokens if cached_tokens >= 0 else kept_tokens(episode, server)
        if cached >= CACHED * (episode.prefix or episode.context):
            return True
        return fits(server, episode.lengths, episode.context)

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """Trim."""
        trim(server, now_s)
        self.touched(server)

    def releases(self, episode: StreamEpisode, waited_s: float) -> bool:
        """Release a place whose tool call lasts longer than its prefix is worth (rule D)."""
        server = episode.server
        return server is not None and episode.lengths.return_price_s(waited_s) > worth_s(server)


def kept_tokens(episode: StreamEpisode, server: StreamServer) -> float:
    """Return the tokens of an idle prefix that its server still has, as far as the core can tell.

    Its host memory holds what left the GPU and drops what was not used for longest, so prefixes of
    later tool calls stay before this one. Without host memory, or among contexts of ended episodes,
    nothing is sure: 0.
    """
    if not server.model.host_kv_tokens or not server.releases_prefixes:
        return 0.0
    others = (one for one in server.episodes.values() if one is not episode)
    before = sum(one.context for one in others if one.state != "tool" or one.since_s > episode.since_s)
    room = server.model.kv_tokens + server.model.host_kv_tokens - before
    return min(max(room, 0.0), episode.prefix)


def worth_s(server: StreamServer) -> float:
    """Return the seconds of an idle prefix that cost as much as to prefill it again."""
    model = server.model
    cost = model.restore_s if model.host_kv_tokens else model.e_s
    step = model.step_s(server.num_running, server.kv_used)
    return cost * model.kv_tokens / (model.a_s / step) / server.raw_speed


def _step(server: StreamServer) -> float:
    kv = min(server.model.kv_tokens, server.max_peak)
    return server.model.step_s(server.num_live + 1, kv) / server.speed
