"""Policies that limit what is in flight."""

from collections.abc import Mapping

from benchmarks.scheduling.policies.sticky import LeastTokens
from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.lengths import TagLengths
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamServer


class Aimd(LeastTokens):
    """prime-rl: at most kappa * C / G episodes in flight.

    C is the KV of all engines, G the mean final context (weight 0.1 for a new one). kappa begins at 1
    after the first step and grows by 2% a step while no engine queued or preempted and the limit binds.
    A preemption cuts the limit to 0.75 of what is in flight, 0.5 if that was not enough; then the
    surplus drains. Its clients repeat a failed call ten times at the same server.
    """

    num_retries = 10

    def __init__(self, servers: Mapping[str, StreamServer]) -> None:
        super().__init__(servers)
        self._cost = 32_768.0
        self._seen = False
        self._kappa, self._backoff = 1.0, 0.75
        self._limit = 0.0
        self._draining, self._clear, self._frozen = False, True, True
        self._waited: dict[str, bool] = {}

    def _in_flight(self) -> int:
        return sum(len(one.episodes) for one in self._servers.values())

    def _capacity(self) -> float:
        return sum(one.model.kv_tokens for one in self._servers.values())

    def choose(self, lengths: TagLengths, context: float, avoid: str) -> StreamServer | None:
        """Return the server with the fewest tokens while fewer than the limit are in flight."""
        limit = self._limit or self._capacity() / self._cost
        return super().choose(lengths, context, avoid) if self._in_flight() < limit else None

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """Cut the limit at a preemption."""
        super().on_report(server, now_s)
        in_flight = self._in_flight()
        limit = self._limit or self._capacity() / self._cost
        self._draining = self._draining and in_flight > limit
        waits = server.num_waiting > 0
        if server.num_preempted or (waits and self._waited.get(server.server_id, False)):
            self._clear = False
        self._waited[server.server_id] = waits
        if server.num_preempted and not self._draining:
            self._limit = max(self._backoff * in_flight, 16.0)
            self._kappa = max(0.25, self._limit * self._cost / self._capacity())
            self._backoff, self._draining = 0.5, True

    def on_step(self) -> None:
        """Grow at most once."""
        if self._frozen:
            self._frozen = False
        elif self._clear:
            self._backoff = 0.75
            if self._in_flight() >= 0.9 * self._limit:
                self._kappa = min(16.0, self._kappa * 1.02)
        self._limit = max(self._kappa * self._capacity() / self._cost, 16.0)
        self._clear = True

    def on_episode(self, tokens: int) -> None:
        """Learn the cost of an episode."""
        self._cost = self._cost + 0.1 * (tokens - self._cost) if self._seen else float(tokens)
        self._seen = True


class PauseShortest(LeastTokens):
    """ThunderAgent: contexts of a server stay within its KV; over it, the shortest in tool calls pause.

    A paused episode loses its place and resumes at the server with room.
    """

    ask_after_s = 0.0

    def _used(self, server: StreamServer) -> float:
        return sum(one.context for one in server.episodes.values() if one.bucket >= 0)

    def load(self, server: StreamServer) -> float:
        """Return the sum of contexts that are not paused."""
        return self._used(server)

    def choose(self, lengths: TagLengths, context: float, avoid: str) -> StreamServer | None:
        """Return the least loaded server if the context fits there."""
        chosen = super().choose(lengths, context, avoid)
        if chosen is None or self._used(chosen) + context > chosen.model.kv_tokens:
            return None
        return chosen

    def stays(self, episode: StreamEpisode, cached_tokens: int) -> bool:
        """Stay unless paused, and resume here if it fits."""
        server = episode.server
        assert server is not None
        if episode.bucket >= 0:
            return True
        return self._used(server) + episode.context <= server.model.kv_tokens

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """Pause the shortest until the rest fits."""
        super().on_report(server, now_s)
        excess = self._used(server) - server.model.kv_tokens
        idle = [one for one in server.episodes.values() if one.state == "tool" and one.bucket >= 0]
        for episode in sorted(idle, key=lambda one: one.context):
            if excess <= 0:
                return
            excess -= episode.context
            ledger.uncount(episode, server)
