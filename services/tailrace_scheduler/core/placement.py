"""Placement: which inference server generates an episode.

A lease sticks while its episode lives, for the server holds its KV cache. It ends when the episode
settles, its worker releases it, its worker falls silent, or the server fails the caller: then the
scheduler places the episode again, on another server if there is one. New episodes go to the server
with the fewest outstanding predicted tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace_protos.control import Lease, LeaseReply, LeaseReport, LeaseRequest, ServerStatus
from tailrace_scheduler.core.health import ServerHealth


class ServerLoad(NamedTuple):
    """A server that may take one more episode."""

    status: ServerStatus
    outstanding_tokens: int  # predicted for the leases it holds
    num_leases: int
    failure_rate: float  # 0 to 1, of recent calls
    is_trusted: bool  # not on probation, or with few leases


def least_loaded(candidates: Sequence[ServerLoad], predicted_tokens: int) -> ServerLoad:
    """The server with the least tokens still to be generated, for an episode with `predicted_tokens`.

    Those of a server that fails count for more; ties go by leases, then by name.
    """
    return min(
        candidates,
        key=lambda one: (
            (one.outstanding_tokens + predicted_tokens) / (1.0 - min(one.failure_rate, 0.9)),
            one.num_leases,
            one.status.server_id,
        ),
    )


@dataclass(slots=True)
class Held:
    """One lease."""

    episode_id: str
    worker_id: str
    server_id: str
    predicted_tokens: int


class Placement:
    """All leases."""

    def __init__(self, health: ServerHealth, lease_ttl_s: float) -> None:
        self._health = health
        self._ttl_s = lease_ttl_s
        self._held: dict[str, Held] = {}
        self._by_worker: dict[str, set[str]] = {}
        self._tokens: dict[str, int] = {}  # server id -> outstanding predicted tokens
        self._counts: dict[str, int] = {}  # server id -> leases
        self._heard_s: dict[str, float] = {}  # worker id -> last sign of life

    @property
    def num_leases(self) -> int:
        """Leases held now."""
        return len(self._held)

    def holds(self, episode_id: str) -> bool:
        """Tell whether a live worker holds a lease for this episode."""
        return episode_id in self._held

    def outstanding_tokens(self, server_id: str) -> int:
        """Predicted tokens of the leases on a server."""
        return self._tokens.get(server_id, 0)

    def heard(self, worker_id: str, now_s: float) -> None:
        """Take a sign of life of a worker."""
        self._heard_s[worker_id] = now_s

    def lease(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Leases for all episodes asked for, or for none and when to ask again."""
        assert len(request.episode_ids) == len(request.predicted_tokens)
        self.heard(request.worker_id, now_s)
        leases = []
        for episode_id, tokens in zip(request.episode_ids, request.predicted_tokens, strict=True):
            held = self._lease_one(request, episode_id, tokens, now_s)
            if held is None:
                return LeaseReply((), self._health.retry_after_s(now_s))
            leases.append(_lease(episode_id, self._health.statuses[held.server_id]))
        return LeaseReply(tuple(leases))

    def report(self, report: LeaseReport, now_s: float) -> None:
        """Episodes ended at a worker, and calls succeeded or failed."""
        self.heard(report.worker_id, now_s)
        for episode_id in report.released:
            held = self._held.get(episode_id)
            if held is not None and held.worker_id == report.worker_id:
                self.release(episode_id)
        for server_id in {*report.failures, *report.successes}:
            failures, successes = report.failures.get(server_id, 0), report.successes.get(server_id, 0)
            self._health.report(server_id, failures, successes, now_s)

    def release(self, episode_id: str) -> None:
        """End the lease of an episode."""
        held = self._held.pop(episode_id, None)
        if held is None:
            return
        self._tokens[held.server_id] -= held.predicted_tokens
        self._counts[held.server_id] -= 1
        mine = self._by_worker[held.worker_id]
        mine.discard(episode_id)
        if not mine:
            del self._by_worker[held.worker_id]

    def expire(self, now_s: float) -> list[str]:
        """End the leases of workers silent for longer than the lease lives; returns their episodes."""
        silent = [one for one, heard_s in self._heard_s.items() if now_s - heard_s > self._ttl_s]
        ended: list[str] = []
        for worker_id in silent:
            del self._heard_s[worker_id]
            ended += self._by_worker.get(worker_id, ())
        self._release_all(ended)
        return ended

    def _release_all(self, episode_ids: Iterable[str]) -> None:
        for episode_id in list(episode_ids):
            self.release(episode_id)

    def _lease_one(
        self, request: LeaseRequest, episode_id: str, predicted_tokens: int, now_s: float
    ) -> Held | None:
        held = self._held.get(episode_id)
        server_id = self._sticky(held, request.failed_server_id, now_s)
        self.release(episode_id)
        if server_id is None:
            server_id = self._choose(predicted_tokens, request.failed_server_id, now_s)
        if server_id is None:
            return None
        held = Held(episode_id, request.worker_id, server_id, predicted_tokens)
        self._held[episode_id] = held
        self._by_worker.setdefault(request.worker_id, set()).add(episode_id)
        self._tokens[server_id] = self._tokens.get(server_id, 0) + predicted_tokens
        self._counts[server_id] = self._counts.get(server_id, 0) + 1
        return held

    def _sticky(self, held: Held | None, failed_server_id: str, now_s: float) -> str | None:
        if held is None or held.server_id == failed_server_id:
            return None
        return held.server_id if self._health.is_alive(held.server_id, now_s) else None

    def _choose(self, predicted_tokens: int, failed_server_id: str, now_s: float) -> str | None:
        usable = [
            self._candidate(status)
            for server_id, status in self._health.statuses.items()
            if self._health.is_usable(server_id, now_s)
        ]
        trusted = [one for one in usable if one.is_trusted]
        candidates = trusted or usable  # a server on probation is better than none
        elsewhere = [one for one in candidates if one.status.server_id != failed_server_id]
        if not candidates:
            return None
        return least_loaded(elsewhere or candidates, predicted_tokens).status.server_id

    def _candidate(self, status: ServerStatus) -> ServerLoad:
        server_id = status.server_id
        num_leases = self._counts.get(server_id, 0)
        return ServerLoad(
            status,
            self.outstanding_tokens(server_id),
            num_leases,
            self._health.record(server_id).failure_rate,
            self._health.may_take_more(server_id, num_leases),
        )


def _lease(episode_id: str, status: ServerStatus) -> Lease:
    return Lease(
        episode_id=episode_id,
        server_id=status.server_id,
        nats_subject=status.nats_subject,
        zmq_endpoint=status.zmq_endpoint,
        zmq_public_key=status.zmq_public_key,
        incarnation=status.incarnation,
    )
