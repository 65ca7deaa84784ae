"""Policies that place every episode at once and keep it where it is."""

import math
from collections.abc import Mapping

from tailrace_scheduler.core.streams.lengths import TagLengths
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamServer


class RoundRobin:
    """One server after the other; an episode stays where it began."""

    ask_after_s = math.inf
    num_retries: int | None = 0
    sees_cache = True

    def __init__(self, servers: Mapping[str, StreamServer]) -> None:
        self._servers = servers
        self._next = 0

    def load(self, server: StreamServer) -> float:
        """Return the load that the policy balances."""
        return (int(server.server_id[1:]) - self._next) % len(self._servers)

    def known_load(self, server: StreamServer) -> float:
        """Return the load as the policy knows it."""
        return self.load(server)

    def choose(self, lengths: TagLengths, context: float, avoid: str) -> StreamServer | None:
        """Return the least loaded server."""
        there = [one for one in self._servers.values() if not one.gone and one.server_id != avoid]
        if not there:
            return None
        chosen = min(there, key=self.known_load)
        self._next = (int(chosen.server_id[1:]) + 1) % len(self._servers)
        return chosen

    def stays(self, episode: StreamEpisode, cached_tokens: int) -> bool:
        """Stay."""
        return True

    def touched(self, server: StreamServer) -> None:
        """Take no notice."""

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """Take no notice."""

    def releases(self, episode: StreamEpisode, waited_s: float) -> bool:
        """Keep every place."""
        return False

    def on_step(self) -> None:
        """Take no notice."""

    def on_episode(self, tokens: int) -> None:
        """Take no notice."""


class Counting(RoundRobin):
    """Loads summed over the episodes of a server, anew when one comes or goes and at its reports."""

    def __init__(self, servers: Mapping[str, StreamServer]) -> None:
        super().__init__(servers)
        self._loads: dict[str, float] = {}

    def known_load(self, server: StreamServer) -> float:
        """Return the load since the last change."""
        found = self._loads.get(server.server_id)
        if found is None:
            found = self._loads[server.server_id] = self.load(server)
        return found

    def touched(self, server: StreamServer) -> None:
        """Count again."""
        self._loads.pop(server.server_id, None)

    def on_report(self, server: StreamServer, now_s: float) -> None:
        """Count again."""
        self.touched(server)


class LeastInFlight(Counting):
    """verl: the server with the fewest requests in flight; later turns stay."""

    def load(self, server: StreamServer) -> float:
        """Return the requests in flight."""
        return sum(one.state == "running" for one in server.episodes.values())


class FewestAssigned(RoundRobin):
    """ROLL: the server with the fewest episodes assigned."""

    def load(self, server: StreamServer) -> float:
        """Return the episodes there."""
        return len(server.episodes)


class LeastTokens(Counting):
    """SkyRL and prime-rl's default: the server with the fewest tokens of its episodes."""

    def load(self, server: StreamServer) -> float:
        """Return the sum of contexts."""
        return sum(one.context for one in server.episodes.values())


class PrefixLoad(RoundRobin):
    """production-stack: every turn goes where the share of its prefix less the load is highest."""

    ask_after_s = 0.0

    def load(self, server: StreamServer) -> float:
        """Return the requests running there by its last report, and those placed since."""
        return len(server.episodes) / server.model.max_running

    def stays(self, episode: StreamEpisode, cached_tokens: int) -> bool:
        """Stay while the cached share outweighs the load above the least loaded server's."""
        assert episode.server is not None
        least = min(self.load(one) for one in self._servers.values() if not one.gone)
        share = cached_tokens / max(episode.context, 1.0)
        return share >= self.load(episode.server) - least
