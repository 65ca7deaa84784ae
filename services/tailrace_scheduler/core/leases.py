"""Leases: the worker that plays each episode, as the workers tell it.

A lease ends when its episode settles, its worker releases it, or its worker falls silent. Servers are
chosen elsewhere (`core/streams`).
"""

from collections.abc import Iterable

from tailrace_protos.control import LeaseReport


class WorkerLeases:
    """Episodes of every worker that is alive."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._worker_of: dict[str, str] = {}
        self._episodes: dict[str, set[str]] = {}  # by worker id
        self._heard_s: dict[str, float] = {}  # worker id -> last sign of life

    def __len__(self) -> int:
        return len(self._worker_of)

    def holds(self, episode_id: str) -> bool:
        """Tell whether a live worker plays this episode."""
        return episode_id in self._worker_of

    def heard(self, worker_id: str, now_s: float) -> None:
        """Take a sign of life of a worker."""
        self._heard_s[worker_id] = now_s

    def take(self, worker_id: str, episode_ids: Iterable[str], now_s: float) -> None:
        """A worker plays these episodes; another that did plays them no more."""
        self.heard(worker_id, now_s)
        for episode_id in episode_ids:
            if self._worker_of.get(episode_id) != worker_id:
                self.end(episode_id)
                self._worker_of[episode_id] = worker_id
                self._episodes.setdefault(worker_id, set()).add(episode_id)

    def report(self, report: LeaseReport, now_s: float) -> list[str]:
        """Take a report; returns the episodes that its worker has released."""
        self.heard(report.worker_id, now_s)
        mine = self._episodes.get(report.worker_id, set())
        released = [episode_id for episode_id in report.released if episode_id in mine]
        for episode_id in released:
            self.end(episode_id)
        self.take(report.worker_id, (state.episode_id for state in report.states), now_s)
        return released

    def end(self, episode_id: str) -> None:
        """End the lease of an episode."""
        worker_id = self._worker_of.pop(episode_id, None)
        if worker_id is None:
            return
        mine = self._episodes[worker_id]
        mine.discard(episode_id)
        if not mine:
            del self._episodes[worker_id]

    def expire(self, now_s: float) -> list[str]:
        """End the leases of workers silent for longer than the lease lives; returns their episodes."""
        silent = [one for one, heard_s in self._heard_s.items() if now_s - heard_s > self._ttl_s]
        ended: list[str] = []
        for worker_id in silent:
            del self._heard_s[worker_id]
            ended += self._episodes.get(worker_id, ())
        for episode_id in ended:
            self.end(episode_id)
        return ended
