"""Health of inference servers: the ones that may take episodes.

A server is alive while it is READY and its heartbeat is fresh. A server whose recent calls mostly
failed is suspended, each time for longer, and gets nothing until a probe succeeds: one that fails fast,
and is therefore idle, attracts no episodes. A server that samples from other weights than it reports is
not used again until its process restarts. A server whose weights are much older than those of another
one keeps its episodes, and gets new ones when it has caught up.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace_protos.control import ServerState, ServerStatus

HALF_LIFE_S = 10.0  # how fast old calls are forgotten
MIN_FAILURES = 3.0  # fewer may be the calls' own fault
SUSPEND_AT_RATE = 0.5
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 60.0
ASK_TO_LEAVE_AGAIN_S = 10.0
SILENT_S = 600.0  # for which the status of a silent server is kept
CONFIRMED_S = 1.0  # over which a server says that its sequences are short


class ServingState(NamedTuple):
    """Number of the servers that serve, and their policy versions."""

    num_healthy: int
    min_policy_version: int  # over healthy servers; -1 without any
    newest_policy_version: int  # of the learner's weights; -1 before the first

    @property
    def is_current(self) -> bool:
        """Tell whether there is a healthy server and all healthy ones serve the newest version."""
        newest = self.newest_policy_version
        return self.num_healthy > 0 and newest >= 0 and self.min_policy_version >= newest


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
    """The registry as last seen, and the servers that the learner distrusts."""

    def __init__(self, server_timeout_s: float, max_version_spread: int = sys.maxsize) -> None:
        self._timeout_s = server_timeout_s
        self._max_version_spread = max_version_spread
        self._statuses: dict[str, ServerStatus] = {}
        self._heard_s: dict[str, float] = {}  # by our own clock, so that clocks may differ
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
            self._forget_silent(now_s)
            self._heard_s[status.server_id] = min(status.heartbeat_unix_s, now_s)
        elif before.heartbeat_unix_s != status.heartbeat_unix_s:
            self._heard_s[status.server_id] = now_s
        self._statuses[status.server_id] = status
        return before

    def _forget_silent(self, now_s: float) -> None:
        """Drop servers that were silent for long: every Pod may have another name."""
        kept_s = max(SILENT_S, self._timeout_s)
        for server_id in [one for one, heard_s in self._heard_s.items() if now_s - heard_s > kept_s]:
            del self._heard_s[server_id], self._statuses[server_id]

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
        is_known = server_id in self._statuses
        return is_known and self._is_trusted(server_id) and self._serves(server_id, now_s)

    def alive(self, now_s: float) -> list[ServerStatus]:
        """Servers that are usable by their own report: those that must apply new weights."""
        return [status for one, status in self._statuses.items() if self.is_alive(one, now_s)]

    def serving(self, newest_policy_version: int, now_s: float) -> ServingState:
        """Versions that the alive servers serve; the learner's newest weights have the given one."""
        versions = [one.policy_version for one in self.alive(now_s)]
        return ServingState(len(versions), min(versions, default=-1), newest_policy_version)

    def present(self, now_s: float) -> list[str]:
        """Servers that are alive or drain: what they hold is there."""
        return [one for one in self._statuses if self._is_trusted(one) and self._is_there(one, now_s)]

    def lagging(self, now_s: float, suspended: Collection[str] = ()) -> list[ServerStatus]:
        """Alive servers that lie more than the bound behind the newest version on a usable one."""
        alive = self.alive(now_s)
        newest = max(
            (one.policy_version for one in alive if one.server_id not in suspended), default=-1
        )
        return [one for one in alive if newest - one.policy_version > self._max_version_spread]

    def _is_trusted(self, server_id: str) -> bool:
        return (server_id, self._statuses[server_id].incarnation) not in self._distrusted

    def _is_there(self, server_id: str, now_s: float) -> bool:
        is_fresh = now_s - self._heard_s.get(server_id, -1e18) <= self._timeout_s
        return is_fresh and self._statuses[server_id].state is not ServerState.STARTING

    def _serves(self, server_id: str, now_s: float) -> bool:
        is_ready = self._statuses[server_id].state is ServerState.READY
        return is_ready and self._is_there(server_id, now_s)


class EpisodeRoom:
    """Tells whether servers have room for the longest episode.

    One message may be anybody's: a worker says its limit twice in a row, and a server its own over
    `CONFIRMED_S` of its heartbeats.
    """

    def __init__(self) -> None:
        self._longest = 0  # tokens; 0: not known
        self._newest_limit = 0
        self._first: dict[str, ServerStatus] = {}  # of those that said the same since

    def worker_said(self, limit_tokens: int) -> None:
        """Take the longest episode of a worker."""
        if limit_tokens == self._newest_limit:
            self._longest = max(self._longest, limit_tokens)
        self._newest_limit = limit_tokens

    def short_server(self, alive: Sequence[ServerStatus]) -> str:
        """Text on a server whose sequences end before the longest episode; empty if there is none."""
        before = self._first
        self._first = {one.server_id: _first_of(before.get(one.server_id), one) for one in alive}
        for one in alive:
            said_s = one.heartbeat_unix_s - self._first[one.server_id].heartbeat_unix_s
            if 0 < one.max_sequence_tokens < self._longest and said_s >= CONFIRMED_S:
                return (
                    f"the server {one.server_id} takes sequences of at most "
                    f"{one.max_sequence_tokens} tokens, and an episode may have {self._longest} "
                    "(agents.max_episode_tokens): lower this, or raise what bounds the server "
                    "(inference.kv_cache_tokens, inference.max_model_len, or the model; see its log)"
                )
        return ""


def _first_of(before: ServerStatus | None, status: ServerStatus) -> ServerStatus:
    """The earlier of two statuses that say the same of the same process, else the newer."""
    if before is None or before.incarnation != status.incarnation:
        return status
    return before if before.max_sequence_tokens == status.max_sequence_tokens else status
