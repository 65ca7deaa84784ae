"""All inference servers: their reports, their speed against the median, their health, their use.

A server that mostly fails is suspended. After that it gets nothing but probes until one succeeds, so
that a server that fails fast, and is therefore idle, attracts no work.

A server that was slow, and therefore gets no work, is not measured either: its speed is forgotten, so
that it is tried again. A new process is taken to be as fast as the others are.
"""

import math
from statistics import median

from msgspec.structs import replace

from tailrace_scheduler.core.health import CallHistory
from tailrace_scheduler.core.streams.events import CallsReported, ServerReport
from tailrace_scheduler.core.streams.records import StreamServer
from tailrace_scheduler.core.streams.settings import EngineModel

SPEED_NEW = 0.2  # weight of a new measurement
SPEEDS_EVERY_S = 2.0
FORGET_S = 20.0  # half-life of the speed of a server that computes nothing
PROBE_AGAIN_S = 10.0
GONE_S = 600.0  # for which the history of a server that is gone is kept


class ServerBook:
    """Servers by id."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self.servers: dict[str, StreamServer] = {}
        self._speeds_s = -math.inf
        self._suspended: set[str] = set()
        self._used = -1.0  # mean use of all servers while work waited; -1: not known

    def report(self, event: ServerReport, now_s: float) -> StreamServer:
        """Take a report; a server that is new or was gone joins."""
        server = self.servers.get(event.server_id)
        if server is None:
            self._forget_gone(now_s)
            server = self.servers[event.server_id] = StreamServer(event.server_id, self._model)
            server.clock_s = now_s
        if server.gone:
            server.gone = server.leaving = False
        if server.incarnation != event.incarnation:  # another process has another history
            server.calls = CallHistory()
            server.raw_speed = self._speed_of_others(server)
            self._suspended.discard(event.server_id)
        self._size(server, event)
        clock = server.tokens_at(now_s)
        server.clock, server.clock_s = clock, now_s
        server.incarnation, server.policy_version = event.incarnation, event.policy_version
        server.num_running, server.kv_used = event.num_running, event.kv_used_tokens
        server.num_waiting, server.num_preempted = event.num_waiting, event.num_preempted
        server.releases_prefixes = event.releases_prefixes
        server.recomputed += event.recomputed_tokens
        if event.step_s > 0:
            server.step_s = event.step_s
            server.tokens_per_s = event.decode_share / event.step_s
            predicted = server.model.step_s(event.num_running, event.kv_used_tokens)
            server.raw_speed *= (predicted / event.step_s / server.raw_speed) ** SPEED_NEW
            server.measured_s = now_s
        elif event.num_running == 0:
            server.tokens_per_s = 0.0
        if now_s - self._speeds_s >= SPEEDS_EVERY_S:
            self._compare_speeds(now_s)
        return server

    def _forget_gone(self, now_s: float) -> None:
        """Drop servers that are gone for long and hold nothing: every Pod may have another name."""
        for server in list(self.servers.values()):
            if server.gone and not server.episodes and now_s - server.clock_s > GONE_S:
                del self.servers[server.server_id]
                self._suspended.discard(server.server_id)

    def _size(self, server: StreamServer, event: ServerReport) -> None:
        model = server.model
        kv = event.kv_capacity_tokens or model.kv_tokens
        running = event.max_running or model.max_running
        host = event.host_kv_tokens
        if (kv, running, host) != (model.kv_tokens, model.max_running, model.host_kv_tokens):
            server.model = replace(model, kv_tokens=kv, max_running=running, host_kv_tokens=host)

    def _speed_of_others(self, server: StreamServer) -> float:
        others = [one for one in self.servers.values() if one is not server and not one.gone]
        return median(one.raw_speed for one in others) if others else server.raw_speed

    def _compare_speeds(self, now_s: float) -> None:
        before_s, self._speeds_s = self._speeds_s, now_s
        present = [one for one in self.servers.values() if not one.gone]
        middle = median(one.raw_speed for one in present)
        forgotten = 1.0 - 0.5 ** ((now_s - before_s) / FORGET_S)
        for server in present:
            if server.measured_s < before_s:
                server.raw_speed *= (middle / server.raw_speed) ** forgotten
            server.speed = server.raw_speed / middle

    def calls(self, event: CallsReported, now_s: float) -> StreamServer | None:
        """Take outcomes of calls; may suspend a server or end its suspension."""
        server = self.servers.get(event.server_id)
        if server is not None:
            server.calls.report(event.failures, event.successes, now_s)
            if server.calls.on_probation:
                self._suspended.add(server.server_id)
            else:
                self._suspended.discard(server.server_id)
        return server

    def to_probe(self, now_s: float) -> list[str]:
        """Return suspended servers whose probe is due; counts as sending it."""
        due = []
        for server_id in self._suspended:
            server = self.servers[server_id]
            if now_s >= _probe_due_s(server) and not server.gone:
                server.probed_s = now_s
                due.append(server_id)
        return due

    def next_probe_s(self) -> float:
        """Return the time of the next probe; infinite if no server that is there is suspended."""
        suspended = (self.servers[one] for one in self._suspended)
        return min((_probe_due_s(one) for one in suspended if not one.gone), default=math.inf)

    def lost_rate(self, is_queue_waiting: bool) -> float:
        """Return the engine seconds lost each second since no work waits for room (rule F).

        They are those of the engine model, in which work is priced: a server that is twice as fast as
        the model loses two of them in a second.
        """
        present = [one for one in self.servers.values() if one.is_usable]
        total = sum(one.raw_speed for one in present)
        used = sum(one.raw_speed * min(_useful(one), 1.0) for one in present if one.num_running)
        if total <= 0:
            return 0.0
        if is_queue_waiting:
            share = used / total
            self._used = share if self._used < 0 else self._used + 0.05 * (share - self._used)
            return 0.0
        normal = self._used if self._used >= 0 else 1.0
        return max(0.0, normal * total - used)

    @property
    def mean_step_s(self) -> float:
        """Return the mean step time of the servers that decode."""
        steps = [one.step_s for one in self.servers.values() if one.step_s > 0 and not one.gone]
        return sum(steps) / len(steps) if steps else self._model.a_s


def _probe_due_s(server: StreamServer) -> float:
    return max(server.calls.suspended_until_s, server.probed_s + PROBE_AGAIN_S)


def _useful(server: StreamServer) -> float:
    batch, kv = server.num_running, server.kv_used
    return server.model.useful_s(batch, kv) / server.model.step_s(batch, kv)
