"""Engine for `inference.engine` that computes nothing: it sleeps for as long as a model would decode.

Step times, the KV budget, evicted prefixes and preemptions are those of the simulator's engine, which
the wall clock drives here. A call gets exactly `max_new_tokens` tokens, which are sent at its end and
when weights change. The prefix of an ended episode stays until it is evicted or released.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from benchmarks.calibration.plans import TOKEN
from tailrace_cli.simulation.engine import SimEngine, SimTurn
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import (
    EngineFeatures,
    EngineRefusalError,
    EngineStats,
    NamedTensor,
    OnChunk,
)
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan
from tailrace_protos.weights import ModelCard
from tailrace_scheduler.core.streams.settings import EngineModel

FOLDER_VARIABLE = "CALIBRATION_FOLDER"  # each engine writes its sums there


class _CountedEngine(SimEngine):
    """Also counts the cached tokens of each prompt, and the tokens that preemptions cost."""

    def __init__(self, model: EngineModel) -> None:
        super().__init__("", model)
        self.num_cached: dict[str, int] = {}  # by episode
        self.num_preempted_tokens = 0

    def _prefill(self, turn: SimTurn) -> None:
        before = self.recomputed
        cached = min(self.idle.get(turn.episode_id, 0), turn.context)
        super()._prefill(turn)
        if turn.segments:
            self.num_preempted_tokens += self.recomputed - before
        else:
            self.num_cached[turn.episode_id] = cached


class _OpenCall:
    def __init__(self, request: GenerateRequest, turn: SimTurn, on_chunk: OnChunk) -> None:
        self.request = request
        self.turn = turn
        self.on_chunk = on_chunk


class FakeEngine:
    """See `Engine`. `inference.engine_args` are fields of `EngineModel`."""

    features = EngineFeatures(
        max_top_logprobs=0,
        stop_strings=False,
        seeds="no",
        kv_on_update=("keep",),
        releases_prefixes=True,
    )

    def __init__(self, card: ModelCard, config: InferenceConfig) -> None:
        sizes = {"kv_tokens": config.kv_cache_tokens, "max_running": config.max_running}
        self._sim = _CountedEngine(EngineModel(**{**sizes, **config.engine_args}))
        self._began_s = time.monotonic()
        self._calls: dict[str, _OpenCall] = {}  # by episode
        self._contexts: dict[str, int] = {}  # computed before, by episode
        self._sampled: dict[str, int] = {}  # by episode
        self._num_generated = self._num_prompt = self._num_finished = 0
        self._versions: list[tuple[int, int]] = []  # first step and version
        self._staged = -1
        self._wake = asyncio.Event()
        self._steps: asyncio.Task[NoReturn] | None = None
        self._late_s = 0.0  # longest delay of a finish
        self._file = Path(os.environ[FOLDER_VARIABLE]) / f"engine-{os.getpid()}.jsonl"

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def start(self) -> None:
        """See `Engine`."""
        self._steps = asyncio.create_task(self._run(), name="engine steps")

    async def watch(self) -> NoReturn:
        """See `Engine`."""
        assert self._steps is not None, "not started"
        await asyncio.wait({self._steps})
        self._steps.result()
        raise AssertionError("steps end with an error")

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `Engine`."""
        assert request.episode_id not in self._calls, "two calls of one episode"
        num_prompt = len(request.prompt_ids) // 4
        known = min(self._contexts.get(request.episode_id, 0), num_prompt)
        turn = SimTurn(request.episode_id, num_prompt, known, request.max_new_tokens)
        self._calls[request.episode_id] = _OpenCall(request, turn, on_chunk)
        self._num_prompt += num_prompt
        self._sim.submit(turn, self._now_s())
        self._wake.set()

    def abort(self, call_id: str) -> None:
        """See `Engine`."""
        for episode_id, call in self._calls.items():
            if call.request.call_id == call_id:
                self._sim.abort(episode_id, self._now_s())
                self._end(call, FinishReason.ABORT)
                self._wake.set()
                return

    def abort_all(self) -> None:
        """See `Engine`."""
        for call in list(self._calls.values()):
            self.abort(call.request.call_id)

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """See `Engine`."""
        for episode_id in episode_ids:
            self._sim.release(episode_id)

    @property
    def base_version(self) -> int:
        """See `Engine`."""
        return -1

    async def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """See `Engine`; the tensors are not read."""
        self._staged = policy_version

    async def apply(self) -> float:
        """See `Engine`."""
        self._catch_up()
        self._versions.append((self._sim.steps, self._staged))
        self._write(version=self._staged)
        return 0.0

    async def pause(self) -> None:
        """See `Engine`; this one cannot."""
        raise EngineRefusalError("this fake engine cannot be paused: set inference.engine: torch")

    resume = sleep = wake = pause

    def allow_sleep(self) -> None:
        """See `Engine`; never called, since it cannot sleep."""

    def stats(self) -> EngineStats:
        """See `Engine`."""
        sim = self._sim
        sim.advance(self._now_s())
        return EngineStats(
            policy_version=self._versions[-1][1] if self._versions else -1,
            capacity_tokens=sim.model.kv_tokens,
            used_tokens=sim.kv,
            cached_tokens=sim.idle_tokens,
            num_running=len(sim.running),
            num_waiting=len(sim.waiting),
            num_steps=sim.steps,
            step_s=sim.decode_s + sim.prefill_s,
            num_generated_tokens=self._num_generated,
            num_prompt_tokens=self._num_prompt,
            num_preemptions=sim.num_preempted,
            num_preempted_tokens=sim.num_preempted_tokens,
            num_finished=self._num_finished,
        )

    async def close(self) -> None:
        """See `Engine`."""
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.wait({self._steps})
        self._write(sampled=self._sampled)

    async def _run(self) -> NoReturn:
        """Ends turns at their time, for ever."""
        while True:
            self._wake.clear()
            self._catch_up()
            left_s = self._sim.next_event_s() - self._now_s()
            try:
                await asyncio.wait_for(self._wake.wait(), max(left_s, 0) if left_s < 1e6 else None)
            except TimeoutError:
                continue

    def _catch_up(self) -> None:
        """End all turns that are due."""
        sim = self._sim
        while (due_s := sim.next_event_s()) <= (now_s := self._now_s()):
            self._late_s = max(self._late_s, now_s - due_s)
            sim.advance(now_s)
            for turn in sim.finished():
                self._contexts[turn.episode_id] = turn.context
                sim.keep_idle(turn.episode_id, turn.context)
                self._end(self._calls[turn.episode_id], FinishReason.LENGTH)
            if sim.waiting:
                sim.admit()

    def _end(self, call: _OpenCall, reason: FinishReason) -> None:
        episode_id = call.request.episode_id
        del self._calls[episode_id]
        spans = self._spans(call.turn)
        count = sum(one.num_tokens for one in spans)
        self._num_generated += count
        self._num_finished += 1
        self._sampled[episode_id] = self._sampled.get(episode_id, 0) + count
        call.on_chunk(
            TokenChunk(
                call.request.call_id,
                pack_int32(np.full(count, TOKEN, np.int32)),
                pack_float32(np.full(count, -1.0, np.float32)),
                spans,
                reason,
                num_cached_tokens=self._sim.num_cached.pop(episode_id, 0),
            )
        )

    def _spans(self, turn: SimTurn) -> tuple[TokenSpan, ...]:
        spans = []
        ends = [step for step, _ in self._versions[1:]]
        for start, end, _, _ in turn.segments:
            for (begin, version), until in zip(self._versions, [*ends, end], strict=True):
                count = min(end, until) - max(start, begin)
                if count > 0:
                    spans.append(TokenSpan(version, "", count))
        return tuple(spans)

    def _write(self, **more: object) -> None:
        sim = self._sim
        line = {
            "unix_s": time.time(),
            "decode_s": sim.decode_s,
            "prefill_s": sim.prefill_s,
            "reprefill_s": sim.reprefill_s,
            "preempted": sim.num_preempted,
            "late_s": self._late_s,
            **more,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
