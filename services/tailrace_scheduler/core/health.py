"""Health of inference servers: the ones that may take episodes.

A server is healthy while it is READY, its heartbeat is fresh, and its callers do not report that it
fails. A server whose recent calls mostly failed is suspended, each time for longer. Then it is on
probation with a few leases until a call succeeds. So a server that fails fast, and is therefore idle,
attracts no episodes. A server that samples from other weights than it reports is not used again until
its process restarts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace_protos.control import ServerState, ServerStatus

HALF_LIFE_S = 10.0  # how fast old calls are forgotten
MIN_FAILURES = 3.0  # fewer may be the calls' own fault
SUSPEND_AT_RATE = 0.5
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 60.0
PROBATION_LEASES = 2
ASK_TO_LEAVE_AGAIN_S = 10.0


@dataclass(slots=True)
class CallHistory:
    """Outcomes of calls to one server as callers report them; counts decay with time."""

    failures: float = 0.0
    successes: float = 0.0
    updated_s: float = 0.0
    suspended_until_s: float = 0.0
    num_suspensions: int = 0  # in a row, without a success between

    @property
    def on_probation(self) -> bool:
        """Tell whether it was suspended and no call has succeeded since."""
        return self.num_suspensions > 0

    @property
    def failure_rate(self) -> float:
        """Share of recent calls that failed, shrunk towards 0 while there are few."""
        return self.failures / (self.failures + self.successes + 1.0)

    def report(self, failures: int, successes: int, now_s: float) -> None:
        """Callers saw these calls end; may suspend the server or end its probation."""
        fade = 0.5 ** (max(now_s - self.updated_s, 0.0) / HALF_LIFE_S)
        self.failures = self.failures * fade + failures
        self.successes = self.successes * fade + successes
        self.updated_s = now_s
        if successes > failures:
            self.num_suspensions = 0
        elif failures and now_s >= self.suspended_until_s and self._fails():
            self._suspend(now_s)

    def _fails(self) -> bool:
        rate = self.failures / (self.failures + self.successes)
        return self.on_probation or (self.failures >= MIN_FAILURES and rate > SUSPEND_AT_RATE)

    def _suspend(self, now_s: float) -> None:
        length_s = min(FIRST_SUSPENSION_S * 2.0**self.num_suspensions, LONGEST_SUSPENSION_S)
        self.suspended_until_s = now_s + length_s
        self.num_suspensions += 1
        self.failures = self.successes = 0.0


class ServerHealth:
    """The registry as last seen, and what callers report beside it."""

    def __init__(self, server_timeout_s: float) -> None:
        self._timeout_s = server_timeout_s
        self._statuses: dict[str, ServerStatus] = {}
        self._heard_s: dict[str, float] = {}  # by our own clock, so that clocks may differ
        self._records: dict[str, CallHistory] = {}
        self._distrusted: set[tuple[str, str]] = set()  # server id and incarnation
        self._asked_s: dict[tuple[str, str], float] = {}  # when it was last told to leave

    @property
    def statuses(self) -> Mapping[str, ServerStatus]:
        """Every server's newest status, by server id."""
        return self._statuses

    def heard(self, status: ServerStatus, now_s: float) -> ServerStatus | None:
        """Take a status; returns the previous one. A repeated old heartbeat does not count as fresh."""
        before = self._statuses.get(status.server_id)
        if before is None:
            self._heard_s[status.server_id] = min(status.heartbeat_unix_s, now_s)
        elif before.heartbeat_unix_s != status.heartbeat_unix_s:
            self._heard_s[status.server_id] = now_s
        self._statuses[status.server_id] = status
        return before

    def report(self, server_id: str, failures: int, successes: int, now_s: float) -> None:
        """Callers saw calls to a server end."""
        if server_id in self._statuses:
            self._records.setdefault(server_id, CallHistory(updated_s=now_s)).report(
                failures, successes, now_s
            )

    def distrust(self, server_id: str, incarnation: str) -> None:
        """Never use this start of the server again."""
        self._distrusted.add((server_id, incarnation))

    def to_leave(self, now_s: float) -> list[ServerStatus]:
        """Distrusted servers that are still there and were not asked lately; counts as asking them."""
        due = []
        for key in self._distrusted:
            status = self._statuses.get(key[0])
            if status is None or status.incarnation != key[1] or not self._serves(key[0], now_s):
                continue
            if now_s - self._asked_s.get(key, -1e18) >= ASK_TO_LEAVE_AGAIN_S:
                self._asked_s[key] = now_s
                due.append(status)
        return due

    def is_alive(self, server_id: str, now_s: float) -> bool:
        """Tell whether it reports READY, did so lately, and is not distrusted."""
        status = self._statuses.get(server_id)
        is_trusted = status is None or (server_id, status.incarnation) not in self._distrusted
        return is_trusted and self._serves(server_id, now_s)

    def _serves(self, server_id: str, now_s: float) -> bool:
        status = self._statuses.get(server_id)
        fresh = now_s - self._heard_s.get(server_id, -1e18) <= self._timeout_s
        return status is not None and status.state is ServerState.READY and fresh

    def alive(self, now_s: float) -> list[ServerStatus]:
        """Servers that are usable by their own report: those that must apply new weights."""
        return [status for one, status in self._statuses.items() if self.is_alive(one, now_s)]

    def record(self, server_id: str) -> CallHistory:
        """Reports of its callers."""
        return self._records.get(server_id) or CallHistory()

    def is_usable(self, server_id: str, now_s: float) -> bool:
        """Tell whether it is alive and not suspended."""
        return self.is_alive(server_id, now_s) and now_s >= self.record(server_id).suspended_until_s

    def may_take_more(self, server_id: str, num_leases: int) -> bool:
        """Tell whether a usable server that holds `num_leases` may take one more."""
        return not self.record(server_id).on_probation or num_leases < PROBATION_LEASES

    def retry_after_s(self, now_s: float) -> float:
        """Seconds to wait while nothing can be placed: at most until the next suspension ends."""
        waits = [
            record.suspended_until_s - now_s
            for one, record in self._records.items()
            if self.is_alive(one, now_s) and record.suspended_until_s > now_s
        ]
        return min(max(min(waits, default=0.5), 0.05), 5.0)
