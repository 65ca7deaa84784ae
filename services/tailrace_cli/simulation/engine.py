"""Simulated inference server: batches, KV cache with idle prefixes, preemption, host memory.

All running requests decode one token a step, so a step counter is a clock of tokens: a request finishes
at a known step, and nothing happens between two finishes. Prefill stalls decoding. Idle prefixes use
free KV and leave it least recently used first; over capacity the newest request is preempted and
recomputed.
"""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from tailrace_scheduler.core.streams.settings import EngineModel

WATERMARK = 0.01  # share of KV that stays free when a request is admitted


@dataclass(slots=True, eq=False)
class SimTurn:
    """One turn at an engine."""

    episode_id: str
    context: int  # tokens before its first sampled one; grows when it is preempted
    known: int  # tokens of the context that were computed before: prefilled again if not cached
    tokens_left: int
    start_step: int = -1  # -1: it waits
    finish_step: int = 0
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Start, end and context of each run, and the tokens that were prefilled for it, not again."""


class SimEngine:
    """One server. `time_s` is the end of what was simulated; it may be ahead of the caller's time."""

    def __init__(self, server_id: str, model: EngineModel, slowness: float = 1.0) -> None:
        self.server_id = server_id
        self.model = model
        self.slowness = slowness  # times every duration
        self.fails = False
        self.time_s = 0.0
        self.steps = 0
        self.kv = 0  # tokens of running requests
        self.running: dict[str, SimTurn] = {}  # by admission
        self.waiting: deque[SimTurn] = deque()
        self.idle: OrderedDict[str, int] = OrderedDict()
        self.idle_tokens = 0
        self.host: OrderedDict[str, int] = OrderedDict()
        self.host_tokens = 0
        self.decode_s = self.prefill_s = self.reprefill_s = 0.0
        self.num_preempted = 0
        self.recomputed = 0  # tokens since the last report
        self.scheduled_s = math.inf
        self.bump_steps: list[int] = [0]  # step at the begin of each version
        self.window: tuple[float, float] = (0, math.inf)  # first step that is measured, and the end
        self._finishes: list[tuple[int, int, SimTurn]] = []
        self._n = 0

    def step_s(self) -> float:
        """Return the seconds of the next decode step."""
        return self.slowness * self.model.step_s(len(self.running), self.kv)

    def advance(self, now_s: float) -> None:
        """Decode until `now_s`: at most one step beyond it, never beyond the next finish."""
        while self.time_s < now_s and self.running:
            limit = self._steps_until_event()
            if limit <= 0:
                return
            self._run(min(limit, self._steps_in(now_s - self.time_s)))
            if self._finishes[0][0] <= self.steps or not self._fits_step():
                return
        if not self.running:
            self.time_s = max(self.time_s, now_s)

    def _run(self, steps: int) -> None:
        batch = len(self.running)
        took_s = self._duration(steps)
        self.steps += steps
        self.kv += steps * batch
        self.time_s += took_s
        self.decode_s += took_s
        if self.kv + self.idle_tokens > self.model.kv_tokens:
            self._evict(self.kv + self.idle_tokens - self.model.kv_tokens)

    def _duration(self, steps: int) -> float:
        model, batch = self.model, len(self.running)
        kv_sum = steps * self.kv + batch * steps * (steps - 1) / 2
        return self.slowness * (steps * (model.a_s + model.c_s * batch) + model.d_s * kv_sum)

    def _steps_in(self, seconds: float) -> int:
        model, batch = self.model, len(self.running)
        square = model.d_s * batch / 2
        linear = model.a_s + model.c_s * batch + model.d_s * self.kv - square
        root = (-linear + math.sqrt(linear * linear + 4 * square * seconds / self.slowness)) / (
            2 * square
        )
        return max(math.ceil(root - 1e-9), 1)

    def _fits_step(self) -> bool:
        return self.kv + len(self.running) <= self.model.kv_tokens

    def _steps_until_event(self) -> int:
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:
            heapq.heappop(finishes)  # aborted or preempted
        until_finish = finishes[0][0] - self.steps
        room = (self.model.kv_tokens - self.kv) // len(self.running)
        return room if room < until_finish else until_finish

    def next_event_s(self) -> float:
        """Return the time of the next finish or preemption; infinite while nothing runs."""
        if not self.running:
            return math.inf
        return self.time_s + self._duration(max(self._steps_until_event(), 0))

    def submit(self, turn: SimTurn, now_s: float) -> None:
        """Queue a turn."""
        self.advance(now_s)
        self.waiting.append(turn)
        self.admit()

    def admit(self) -> None:
        """Admit waiting turns while there is room."""
        model = self.model
        spare = int(WATERMARK * model.kv_tokens)
        while self.waiting and len(self.running) < model.max_running:
            turn = self.waiting[0]
            room = model.kv_tokens - self.kv - turn.context - len(self.running)
            if room < (spare if self.running else 0):
                return
            self.waiting.popleft()
            self._prefill(turn)
            turn.start_step = self.steps
            turn.finish_step = self.steps + turn.tokens_left
            self.running[turn.episode_id] = turn
            self._n += 1
            heapq.heappush(self._finishes, (turn.finish_step, self._n, turn))
            self.kv += turn.context
            self._evict(self.kv + self.idle_tokens - model.kv_tokens)

    def _prefill(self, turn: SimTurn) -> None:
        model = self.model
        cached = min(self._pop_idle(turn.episode_id), turn.context)
        restored = 0
        if model.host_kv_tokens:
            kept = self.host.pop(turn.episode_id, 0)
            self.host_tokens -= kept
            restored = max(min(kept, turn.known) - cached, 0)
        again = max(turn.known - cached - restored, 0)
        new = turn.context - max(turn.known, cached)
        self.recomputed += again + restored
        again_s = self.slowness * (model.e_s * again + model.restore_s * restored)
        took_s = self.slowness * model.e_s * new + again_s
        self.time_s += took_s
        self.prefill_s += took_s
        self.reprefill_s += again_s

    def _pop_idle(self, episode_id: str) -> int:
        tokens = self.idle.pop(episode_id, 0)
        self.idle_tokens -= tokens
        return tokens

    def _evict(self, excess: int) -> None:
        while excess > 0 and self.idle:
            episode_id, tokens = next(iter(self.idle.items()))
            taken = min(tokens, excess)
            excess -= taken
            self.idle_tokens -= taken
            if taken == tokens:
                del self.idle[episode_id]
            else:
                self.idle[episode_id] = tokens - taken  # the tail goes first
            self._to_host(episode_id, tokens)

    def _to_host(self, episode_id: str, tokens: int) -> None:
        if not self.model.host_kv_tokens:
            return
        before = self.host.pop(episode_id, 0)
        self.host[episode_id] = max(before, tokens)
        self.host_tokens += max(before, tokens) - before
        while self.host_tokens > self.model.host_kv_tokens and self.host:
            self.host_tokens -= self.host.popitem(last=False)[1]

    def finished(self) -> list[SimTurn]:
        """Take out the turns that have ended; preempt while the next step has no room."""
        done = []
        while self._finishes and self._finishes[0][0] <= self.steps:
            step, _, turn = heapq.heappop(self._finishes)
            if turn.finish_step == step:
                self._stop(turn)
                done.append(turn)
        while len(self.running) > 1 and not self._fits_step():
            newest = next(reversed(self.running.values()))
            self._stop(newest)
            self._to_host(newest.episode_id, newest.context)
            newest.known = newest.context
            self.waiting.appendleft(newest)
            self.num_preempted += 1
        return done

    def _stop(self, turn: SimTurn) -> None:
        """End a running turn here, its tokens so far kept."""
        del self.running[turn.episode_id]
        ran = self.steps - turn.start_step
        new = 0 if turn.segments else turn.context - turn.known
        turn.segments.append((turn.start_step, self.steps, turn.context, new))
        turn.context += ran
        turn.tokens_left -= ran
        turn.start_step = turn.finish_step = -1
        self.kv -= turn.context

    def keep_idle(self, episode_id: str, tokens: int) -> None:
        """Leave the prefix of an episode in free KV."""
        self.idle[episode_id] = tokens
        self.idle_tokens += tokens
        self._evict(self.kv + self.idle_tokens - self.model.kv_tokens)

    def release(self, episode_id: str) -> None:
        """Forget the prefix of an episode, which ended or goes on elsewhere."""
        self._pop_idle(episode_id)
        self.host_tokens -= self.host.pop(episode_id, 0)

    def abort(self, episode_id: str, now_s: float) -> SimTurn | None:
        """End the turn of an episode and return it, with the tokens so far; its prefix stays."""
        self.advance(now_s)
        turn = self.running.get(episode_id)
        if turn is not None:
            self._stop(turn)
            self.keep_idle(episode_id, turn.context)
            self.admit()
            return turn
        for waiting in self.waiting:
            if waiting.episode_id == episode_id:
                self.waiting.remove(waiting)
                return waiting
        return None

    def recompute(self) -> None:
        """Compute the KV of running requests again and forget all other: the weights have changed."""
        took_s = self.slowness * self.model.e_s * self.kv
        self.time_s += took_s
        self.prefill_s += took_s
        self.reprefill_s += took_s
        self.idle.clear()
        self.host.clear()
        self.idle_tokens = self.host_tokens = 0

    def cached(self, episode_id: str) -> int:
        """Return the tokens of an idle episode's prefix that are still here."""
        if self.model.host_kv_tokens:
            return max(self.idle.get(episode_id, 0), self.host.get(episode_id, 0))
        return self.idle.get(episode_id, 0)
