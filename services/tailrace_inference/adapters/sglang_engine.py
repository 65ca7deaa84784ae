"""SGLang behind the `Engine` protocol.

Invariants: a token carries the version whose weights sampled it; staged weights lie in shared memory of
the host until `apply`, which gets only tensors that fit; prefixes are salted by policy version, and
`kv_on_update: recompute` also drops them, so that none serves another version; pending control calls
fail at once when SGLang dies or stops to answer; after one that failed the engine counts as dead.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import psutil
from tokenizers import Tokenizer

from tailrace.clock import SteadyClock
from tailrace.foreign import ForeignCodeError
from tailrace_inference.adapters.sglang_calls import SGLangCall
from tailrace_inference.adapters.sglang_settings import (
    check_arguments,
    host_cache_tokens,
    model_folder,
    server_arguments,
    usable_tokens,
)
from tailrace_inference.adapters.sglang_thread import CallOutput, SGLangThread
from tailrace_inference.adapters.staging import (
    SERVER_PID,
    HostStage,
    OwnFolder,
    StagedEngine,
    is_runnable,
    max_sequence_tokens,
)
from tailrace_inference.config import LEAST_TEMPERATURES, WEIGHTS_DTYPES, InferenceConfig
from tailrace_inference.core.calls import CallCounts
from tailrace_inference.core.requests import InvalidRequestError, check_request, failed, refused
from tailrace_inference.engine.guided import Guides
from tailrace_inference.engine.request import guide_spec
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import (
    EngineFailedError,
    EngineFeatures,
    EngineRefusalError,
    EngineStats,
    OnChunk,
)
from tailrace_protos.generation import (
    CallErrorCode,
    FinishReason,
    GenerateRequest,
)
from tailrace_protos.weights import ModelCard

T = TypeVar("T")

_RETRY_AFTER_S = 0.5
_CONTROL_S = 60.0  # deadline of a pause or resume; a death ends it earlier
_LOAD_S = 120.0  # deadline of a swap
_BEAT_S = 0.25  # between two checks of the processes
_SILENT_S = 1.0  # without an answer, processes that compute nothing, and would not, hang
_BUSY_S = 60.0  # without an answer, processes that compute hang


class SGLangEngine(StagedEngine):
    """`Engine` of the package sglang; `inference.engine_args` are its `ServerArgs`."""

    def __init__(self, card: ModelCard, config: InferenceConfig) -> None:
        check_arguments(config)
        text = card.tokenizer_files.get("tokenizer.json")
        self._tokenizer = None if text is None else Tokenizer.from_str(text.decode())
        self._config = config
        self._folder = OwnFolder()  # the model's configuration and the sockets
        dtype = model_folder(card, config, self._folder.path)
        self._max_len = max_sequence_tokens(config, card)
        if not config.gpu_memory_utilization:
            self._max_len = min(self._max_len, config.kv_cache_tokens)
        arguments = server_arguments(config, self._folder.path, self._max_len, dtype)
        self._host_cache_tokens = partial(host_cache_tokens, card, config, dtype)
        self._capacity_tokens = self._host_capacity_tokens = 0  # SGLang knows them when it has started
        self.features = EngineFeatures(
            stop_strings=self._tokenizer is not None,
            least_temperature=LEAST_TEMPERATURES["sglang"],
            adapters=True,
            cache_salt=True,
            guided=self._tokenizer is not None,
            weights_dtypes=WEIGHTS_DTYPES,
            sleep=True,
            unread_settings=("cpu_matmul", "forward", "step_in"),
        )
        self._sglang = SGLangThread(
            arguments, self._on_outputs, config.stream_interval_ms / 1000.0, config.stream_chunk_tokens
        )
        self._calls: dict[str, SGLangCall] = {}  # by rid
        self._rids: dict[str, str] = {}  # of open calls, by call id
        self._num_calls = 0
        self._is_paused = False
        self._is_swapping = False
        self._watching: asyncio.Task[NoReturn] | None = None
        self._counts = CallCounts()
        self.policy_version = -1
        self._stage = HostStage(self._folder.path, dtype)
        self._guides = (
            None if self._tokenizer is None else Guides(self._tokenizer, self._stage.vocab_size)
        )

    async def start(self) -> None:
        """See `Engine`."""
        os.environ[SERVER_PID] = str(os.getpid())
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await self._sglang.start()
        except ForeignCodeError as error:
            self._remove_files()
            raise EngineRefusalError(f"{error} (inference.engine_args, or the model)") from error
        self._capacity_tokens = usable_tokens(self._config, self._sglang.num_cache_tokens)
        self._max_len = min(self._max_len, self._capacity_tokens)
        self._host_capacity_tokens = self._host_cache_tokens(self._capacity_tokens)
        self._watching = asyncio.create_task(self._watch(), name="sglang watch")

    async def watch(self) -> NoReturn:
        """See `Engine`."""
        assert self._watching is not None, "not started"
        await asyncio.wait({self._watching})
        self._watching.result()
        raise AssertionError("the watch ends with an error")

    async def _watch(self) -> NoReturn:
        """Checks that the processes live, answer or compute, and do what control calls ask for."""
        ping: Future[dict[str, int]] | None = None
        clock = SteadyClock()  # a machine that was suspended has answered nothing, either
        clock.begin()
        answered_s = worked_s = clock.unix_s()
        cpu_s = 0.0
        while True:
            await self._beat()
            now_s = clock.unix_s()
            before_s, (cpu_s, is_working) = cpu_s, self._work()
            is_silent = ping is not None and not ping.done()
            if is_working and (cpu_s > before_s or (is_silent and await self._is_starved())):
                worked_s = now_s
            if not is_silent:
                answered_s = now_s
                ping = self._sglang.call(self._sglang.mark())
            silent_s = now_s - answered_s
            if min(silent_s, now_s - worked_s) > _SILENT_S or silent_s > self._most_silent_s():
                raise EngineFailedError(f"SGLang has not answered for {silent_s:.1f} s")

    def _most_silent_s(self) -> float:
        """Seconds without an answer that processes which compute may take."""
        return _LOAD_S if self._is_swapping else _BUSY_S

    async def _beat(self) -> None:
        """Waits for the next look; raises the error of a control call that has failed."""
        failed, _ = await asyncio.wait({self._failure}, timeout=_BEAT_S)
        for failure in failed:
            failure.result()

    def _work(self) -> tuple[float, bool]:
        """CPU seconds of the processes, and whether none is stopped; raises `EngineFailedError`."""
        seconds, is_working = 0.0, True
        for process in self._sglang.processes:
            try:
                with process.oneshot():
                    status, times = process.status(), process.cpu_times()
            except psutil.NoSuchProcess as error:
                raise EngineFailedError(f"SGLang's process {process.pid} ended") from error
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                raise EngineFailedError(f"SGLang's process {process.pid} ended")
            is_working &= status != psutil.STATUS_STOPPED
            seconds += times.user + times.system
        return seconds, is_working

    async def _is_starved(self) -> bool:
        """Tells whether the processes would compute if the machine let them."""
        pids = [process.pid for process in self._sglang.processes]
        return await asyncio.to_thread(is_runnable, pids)

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `Engine`."""
        waiting = self.stats().num_waiting
        if waiting >= self._config.max_waiting:
            reason = f"{waiting} requests are waiting"
            on_chunk(failed(request.call_id, CallErrorCode.OVERLOADED, reason, _RETRY_AFTER_S))
            return
        try:
            prompt = check_request(request, self._max_len, self._stage.vocab_size, self.features)
            guide = guide_spec(request, self._guides)
        except InvalidRequestError as error:
            on_chunk(refused(request.call_id, error))
            return
        self._num_calls += 1
        call = SGLangCall(f"{self._num_calls:015d}", request, on_chunk, len(prompt), self._counts)
        call.guide = guide
        if request.sampling.stop:
            assert self._tokenizer is not None
            continued = prompt[len(prompt) - request.num_continued :].tolist()
            call.stops = StopStrings(self._tokenizer, request.sampling.stop, continued)
        self._calls[call.rid] = call
        self._rids[request.call_id] = call.rid
        if not self._is_held:
            self._send(call)

    @property
    def _is_held(self) -> bool:
        return self._is_paused or self._is_swapping or self.policy_version < 0

    def _send(self, call: SGLangCall) -> None:
        call.send(self.policy_version)
        request, sampling = call.request, call.request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed & (2**63 - 1)
        generate = {
            "input_ids": np.frombuffer(request.prompt_ids, np.int32).tolist(),
            "cache_salt": str(self.policy_version),
            "top_logprobs_num": min(request.top_logprobs, self._stage.vocab_size),
            "sampling_params": {
                "max_new_tokens": min(request.max_new_tokens, self._max_len - call.num_prompt),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": seed,
                **({"ebnf": call.guide} if call.guide else {}),
            },
        }
        self._sglang.submit(call.rid, generate, eager=call.stops is not None)

    def abort(self, call_id: str) -> None:
        """See `Engine`."""
        rid = self._rids.get(call_id)
        if rid is None:
            return
        call = self._calls[rid]
        if call.is_sent:
            self._sglang.abort(rid)
        else:
            call.close(FinishReason.ABORT)
            del self._calls[rid], self._rids[call_id]

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """See `Engine`; SGLang has no way to give a context up, so the feature is not declared."""

    def open_call_ids(self) -> list[str]:
        """See `StagedEngine`."""
        return list(self._rids)

    async def apply(self) -> float:
        """See `Engine`. A failure leaves SGLang with parts of two versions: it must be restarted."""
        policy_version, path = self.take_staged()
        began_s = time.perf_counter()
        recompute = self._config.kv_on_update == "recompute" or self.policy_version < 0
        self._is_swapping = True
        try:
            counts = await self._control(
                self._sglang.pause("retract" if recompute else "in_place"), _CONTROL_S
            )
            await self._control(self._sglang.load(path, policy_version, flush=recompute), _LOAD_S)
            self.policy_version = policy_version
            for call in self._calls.values():
                if call.is_sent:
                    call.swap(counts.get(call.rid, 0), policy_version, recompute=recompute)
            if not self._is_paused:
                await self._control(self._sglang.resume(), _CONTROL_S)
        finally:
            self._is_swapping = False
        swap_s = time.perf_counter() - began_s
        self._send_held()
        return swap_s

    async def pause(self) -> None:
        """See `Engine`."""
        self._is_paused = True
        await self._control(self._sglang.pause("in_place"), _CONTROL_S)

    async def resume(self) -> None:
        """See `Engine`."""
        await self._control(self._sglang.resume(), _CONTROL_S)
        self._is_paused = False
        self._send_held()

    def allow_sleep(self) -> None:
        """See `Engine`."""
        self._sglang.allow_sleep()

    async def sleep(self) -> None:
        """See `Engine`."""
        await self._control(self._sglang.sleep(), _LOAD_S)

    async def wake(self) -> None:
        """See `Engine`."""
        await self._control(self._sglang.wake(), _LOAD_S)

    def _send_held(self) -> None:
        if not self._is_held:
            for call in [call for call in self._calls.values() if not call.is_sent]:
                self._send(call)

    async def _control(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Result of a control call; without one it raises `EngineFailedError`, as `watch` then does."""
        assert self._watching is not None, "not started"
        answer = asyncio.wrap_future(self._sglang.call(work))
        both: set[asyncio.Future[Any]] = {answer, self._watching}
        await asyncio.wait(both, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            if self._watching.done():
                self._watching.result()
            self._fail(f"SGLang did not answer a control call in {deadline_s:g} s")
        if (error := answer.exception()) is not None:
            self._fail(f"SGLang failed a control call: {error}")
        return answer.result()

    def _fail(self, reason: str) -> NoReturn:
        """Ends the watch, so that callers hear of it at once, and raises."""
        error = EngineFailedError(reason)
        if not self._failure.done():
            self._failure.set_exception(error)
        raise error

    def _on_outputs(self, outputs: list[CallOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.rid)
            if call is None:
                continue
            if output.finish is not None or output.error:
                del self._calls[output.rid]
            if call.take(output):
                self._sglang.abort(output.rid)
            if call.is_closed and self._rids.get(call.request.call_id) == output.rid:
                del self._rids[call.request.call_id]

    def stats(self) -> EngineStats:
        """See `Engine`. Calls run from their first token on; steps are those of decoding."""
        running = [call for call in self._calls.values() if call.num_tokens]
        used = sum(call.num_prompt + call.num_tokens for call in running)
        counts, load = self._counts, self._sglang.load_snapshot
        decoding = (load and load.decode_moments) or [0.0] * 3  # steps, calls in them, microseconds
        return EngineStats(
            policy_version=self.policy_version,
            capacity_tokens=self._capacity_tokens,
            max_sequence_tokens=self._max_len,
            used_tokens=used,
            cached_tokens=max(0, load.num_used_tokens - used) if load else 0,
            num_steps=int(decoding[0]),
            step_s=(decoding[2] + load.total_prefill_busy_us) / 1e6 if load else 0.0,
            num_running=len(running),
            num_waiting=len(self._calls) - len(running),
            num_computed_tokens=counts.computed,
            num_generated_tokens=counts.generated,
            num_prompt_tokens=counts.prompt,
            num_prefix_hit_tokens=counts.prefix_hit,
            num_recomputed_tokens=counts.recomputed,
            num_stale_kv_tokens=counts.stale,
            num_preemptions=counts.preempted,
            num_preempted_tokens=counts.preempted_tokens,
            host_capacity_tokens=self._host_capacity_tokens,
            num_finished=counts.finished,
            num_nonfinite_logprobs=counts.nonfinite,
        )

    async def close(self) -> None:
        """See `Engine`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.to_thread(self._sglang.close)
        self._remove_files()

    def _remove_files(self) -> None:
        self._stage.close()
        self._folder.remove()
