"""Handlers of the inference service: generation calls and control requests."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from tailrace.bus import CallFailedError
from tailrace.channel import ChunkSink, GenerateHandler
from tailrace.log import get_logger
from tailrace.tracing import is_recorded
from tailrace_inference.adapters.call_trace import traced
from tailrace_inference.adapters.emission_log import EmissionLog
from tailrace_inference.core.reprefill import ContextRecord
from tailrace_inference.ports import Engine, OnChunk
from tailrace_protos.base import pack_int32
from tailrace_protos.control import DrainRequest, ProbeRequest, ServerState, ServerStatus
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    GenerateRequest,
    TokenChunk,
)

log = get_logger(__name__)

PROBE_S = 4.0  # for the token of a probe
ABORT_S = 3.0  # for the last chunks of aborted calls, at the end of a drain


class InferenceHandler:
    """`GenerateHandler` of an engine; refuses all calls unless the server is READY."""

    def __init__(
        self,
        engine: Engine,
        is_draining: Callable[[], bool],
        emissions: EmissionLog | None = None,
        contexts: ContextRecord | None = None,
    ) -> None:
        self.has_weights = False
        self.num_failed = 0  # calls that ended with an internal error
        self._engine = engine
        self._is_draining = is_draining
        self._emissions = emissions
        self._contexts = contexts
        self._open: dict[str, ChunkSink] = {}
        self._quiet = asyncio.Event()  # no call is open
        self._quiet.set()
        self._started_s = self._quiet_since_s = time.monotonic()
        self._quiet_s = 0.0

    @property
    def state(self) -> ServerState:
        """State of this server in the registry."""
        if self._is_draining():
            return ServerState.DRAINING
        return ServerState.READY if self.has_weights else ServerState.STARTING

    @property
    def num_open(self) -> int:
        """Calls whose last chunk is not sent yet."""
        return len(self._open)

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """See `GenerateHandler`."""
        if self.state is not ServerState.READY:
            error = CallError(CallErrorCode.NOT_READY, f"this server is {self.state.value}")
            sink.send(TokenChunk(request.call_id, error=error))
            return
        if not self._open:
            self._quiet.clear()
            self._quiet_s += time.monotonic() - self._quiet_since_s
        self._open[request.call_id] = sink
        on_chunk = self._forward(request, sink)
        if is_recorded(request.traceparent):
            on_chunk = traced(request, on_chunk)
        with ExitStack() as undo:
            undo.callback(self._forget, request.call_id)
            self._engine.submit(request, on_chunk)
            undo.pop_all()

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens of contexts computed again because they left the cache between two turns."""
        return 0 if self._contexts is None else self._contexts.num_recomputed_tokens

    @property
    def idle_s(self) -> float:
        """Seconds without an open call."""
        return self._quiet_s + (0.0 if self._open else time.monotonic() - self._quiet_since_s)

    @property
    def busy_s(self) -> float:
        """Seconds with open calls."""
        return time.monotonic() - self._started_s - self.idle_s

    async def finish(self, timeout_s: float) -> None:
        """Waits for the open calls; aborts those that take longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            log.warning("calls aborted at the end of the drain", num_calls=self.num_open)
            self._engine.abort_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self._quiet.wait()

    def abort(self, call_id: str) -> None:
        """See `GenerateHandler`."""
        self._engine.abort(call_id)

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """See `GenerateHandler`."""
        if self._engine.features.releases_prefixes:
            self._engine.release_prefixes(episode_ids)

    def fail_all(self, reason: str) -> None:
        """Ends all calls with an internal error, so that their callers continue on other servers."""
        error = CallError(CallErrorCode.INTERNAL, reason)
        for call_id, sink in list(self._open.items()):
            self.num_failed += 1
            sink.send(TokenChunk(call_id, error=error))
        self._open.clear()
        self._rest()

    def close(self) -> None:
        """Close the emission log."""
        if self._emissions is not None:
            self._emissions.close()

    def _forward(self, request: GenerateRequest, sink: ChunkSink) -> OnChunk:
        contexts, turn = self._contexts, None
        if contexts is not None:
            turn = contexts.begun(request)

        def on_chunk(chunk: TokenChunk) -> None:
            if turn is not None:
                turn.take(chunk)
            if chunk.finish_reason is not None or chunk.error is not None:
                self._forget(request.call_id)
                if contexts is not None and turn is not None:
                    contexts.ended(turn, chunk.num_cached_tokens)
            if self._emissions is not None and len(chunk.token_ids):
                self._emissions.append(request.episode_id, chunk)
            sink.send(chunk)

        return on_chunk

    def _forget(self, call_id: str) -> None:
        self._open.pop(call_id, None)
        if not self._open:
            self._rest()

    def _rest(self) -> None:
        self._quiet_since_s = time.monotonic()
        self._quiet.set()


class _ProbeSink:
    """Waits for the end of a call."""

    def __init__(self) -> None:
        self.end: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()

    def send(self, chunk: TokenChunk) -> None:
        """See `ChunkSink`."""
        is_last = chunk.finish_reason is not None or chunk.error is not None
        if is_last and not self.end.done():
            self.end.set_result(chunk)


class ControlHandler:
    """Answers `DrainRequest` (the server drains and exits, as after SIGTERM) and `ProbeRequest`."""

    def __init__(
        self,
        stop: Callable[[str], None],
        status: Callable[[], ServerStatus],
        calls: GenerateHandler,
    ) -> None:
        self._stop = stop
        self._status = status
        self._calls = calls
        self._num_probes = itertools.count()

    async def probe(self, request: ProbeRequest) -> ServerStatus:
        """Sample a token as any call does; raises `CallFailedError` if the engine fails."""
        call_id, sink = f"probe.{next(self._num_probes)}", _ProbeSink()
        self._calls.submit(GenerateRequest(call_id, "probe", pack_int32([0]), 1), sink)
        try:
            async with asyncio.timeout(PROBE_S):
                chunk = await sink.end
        except TimeoutError:
            self._calls.abort(call_id)
            reason = f"no token within {PROBE_S:g} s"
            raise CallFailedError(CallErrorCode.INTERNAL, reason) from None
        if chunk.error is not None:
            raise CallFailedError(chunk.error.code, chunk.error.reason)
        return self._status()

    async def drain(self, request: DrainRequest) -> ServerStatus:
        """Starts the drain; the reply counts the calls in flight."""
        status = self._status()
        if request.incarnation not in ("", status.incarnation):
            return status
        self._stop(f"drain request: {request.reason or 'no reason given'}")
        return self._status()
