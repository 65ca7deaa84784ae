"""`EngineDriver`: calls an engine's steps, in the event loop or on a worker thread.

Invariants: steps and swaps never overlap; chunks reach their callbacks in the event loop, in the
order in which the engine made them; the event loop runs between two steps, so that requests can join.
A step in the event loop costs no thread switch: best for steps of milliseconds (CPU, small models). A
step in a thread keeps the loop free while a CUDA device computes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tailrace_inference import metrics
from tailrace_inference.ports import Engine, OnChunk
from tailrace_protos.generation import GenerateRequest, TokenChunk

T = TypeVar("T")


class EngineDriver:
    """Calls the steps of one engine. All methods run in the event loop."""

    def __init__(self, engine: Engine, *, in_thread: bool) -> None:
        self.engine = engine
        self._executor = ThreadPoolExecutor(1, "engine") if in_thread else None
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._made: deque[tuple[OnChunk, TokenChunk]] = deque()
        self._started_s = time.monotonic()
        self._idle_since_s: float | None = self._started_s
        self._idle_s = 0.0

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Queues a request; `on_chunk` is called in the event loop."""
        if self._executor is not None:
            on_chunk = self._deliver_later(on_chunk)
        self.engine.submit(request, on_chunk)
        self._wake.set()

    def abort(self, call_id: str) -> None:
        """Ends a call at the next step."""
        self.engine.abort(call_id)
        self._wake.set()

    def abort_all(self) -> None:
        """Ends all calls at the next step."""
        self.engine.abort_all()
        self._wake.set()

    async def run(self) -> None:
        """Steps until it is cancelled or the engine raises an error."""
        await self._on_engine_thread(self.engine.attach)
        while True:
            await self.run_until_idle()
            self._wake.clear()
            if not self.engine.has_work():
                self._rest(time.monotonic())
                await self._wake.wait()

    async def run_until_idle(self) -> None:
        """Steps until the engine has nothing to do."""
        self._work(time.monotonic())
        while self.engine.has_work():
            async with self._turn:
                began_s = time.perf_counter()
                await self._on_engine_thread(self.engine.step)
                metrics.STEP_SECONDS.observe(time.perf_counter() - began_s)
            self._deliver()
            await asyncio.sleep(0)
        self._deliver()

    async def apply_weights(self) -> float:
        """Swaps to the staged weights between two steps; returns the seconds of the pause."""
        async with self._turn:
            swap_s = await self._on_engine_thread(self.engine.apply)
        self._deliver()
        self._wake.set()
        return swap_s

    def close(self) -> None:
        """Releases the thread without waiting for its step."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    @property
    def idle_s(self) -> float:
        """Seconds without work."""
        since_s = self._idle_since_s
        return self._idle_s + (0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def busy_s(self) -> float:
        """Seconds with work."""
        return time.monotonic() - self._started_s - self.idle_s

    def _rest(self, now_s: float) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = now_s

    def _work(self, now_s: float) -> None:
        if self._idle_since_s is not None and self.engine.has_work():
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = None

    async def _on_engine_thread(self, work: Callable[[], T]) -> T:
        if self._executor is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _deliver_later(self, on_chunk: OnChunk) -> OnChunk:
        return lambda chunk: self._made.append((on_chunk, chunk))

    def _deliver(self) -> None:
        """Passes the chunks of the engine's thread to their callbacks."""
        while self._made:
            on_chunk, chunk = self._made.popleft()
            on_chunk(chunk)
