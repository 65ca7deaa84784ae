"""`VllmEngine`: vLLM's AsyncLLM in this process, its engine core in another.

Invariants: vLLM tags each token with the version that was active when it was sampled, and versions
change only while the scheduler is paused; after the first control call that fails or takes too long the
engine counts as dead. Stop strings are searched here, so that they mean the same as in other engines.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
from tokenizers import Tokenizer
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tailrace.log import get_logger
from tailrace_inference.adapters.node_group import NodeGroup, cause_of, gather_nodes
from tailrace_inference.adapters.node_link import Node
from tailrace_inference.adapters.staging import (
    SERVER_PID,
    HostStage,
    OwnFolder,
    StagedEngine,
    is_runnable,
    max_sequence_tokens,
    processor_seconds,
    token_bytes,
    unless_failed,
    write_model_folder,
)
from tailrace_inference.adapters.start_log import StartLog
from tailrace_inference.adapters.vllm_arguments import check_engine_args, engine_arguments
from tailrace_inference.adapters.vllm_calls import STREAM_TOKENS, SchedulerStats, VllmCall, queue_s
from tailrace_inference.adapters.vllm_release import release_id
from tailrace_inference.config import LEAST_TEMPERATURES, WEIGHTS_DTYPES, InferenceConfig
from tailrace_inference.core.calls import CallCounts, find_stop, version_spans
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
from tailrace_protos.generation import CallErrorCode, FinishReason, GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)
T = TypeVar("T")

_CONTROL_S = 60.0  # deadline of a control call; a death ends it earlier
_PING_S = 0.25  # between two questions whether the engine answers
_HUNG_LOOKS = 4  # a second without an answer, any processor time or need of it: it hangs
_STUCK_S = 120.0  # without an answer, but busy
_RETRY_AFTER_S = 0.5


class VllmEngine(StagedEngine):
    """See `Engine`."""

    def __init__(self, card: ModelCard, config: InferenceConfig) -> None:
        check_engine_args(config.engine_args)
        text = card.tokenizer_files.get("tokenizer.json")
        self._tokenizer = None if text is None else Tokenizer.from_str(text.decode())
        self.features = EngineFeatures(
            stop_strings=text is not None,
            seeds="engine",
            speculative=True,
            min_p="speculative_config" not in config.engine_args,
            least_temperature=LEAST_TEMPERATURES["vllm"],
            adapters=True, cache_salt=True, sleep=True,
            releases_prefixes=config.prefix_cache,
            guided=text is not None,
            weights_dtypes=WEIGHTS_DTYPES,
            unread_settings=("forward", "step_in", "cpu_matmul"),
        )  # fmt: skip
        self._card, self._config = card, config
        self._folder = OwnFolder()  # the model's configuration and the sockets
        self._calls: dict[str, VllmCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._guides: Guides | None = None
        self._counts, self._stats, self._policy_version = CallCounts(), SchedulerStats(), -1
        self._group: NodeGroup | None = None  # of a server on several nodes
        self._is_paused = self._sleeps = False
        self._control = asyncio.Lock()

    async def start(self) -> None:
        """See `Engine`."""
        content = write_model_folder(self._card, self._folder.path)
        self.max_len = max_sequence_tokens(self._config, self._card)
        max_logprobs, folder = self.features.max_top_logprobs, str(self._folder.path)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        node = Node.from_env(self._config.num_nodes)
        self._group, welcome = await gather_nodes(node, self._fail)
        self._share = None if self._group is None else self._group.give
        args = engine_arguments(
            self._config,
            folder,
            content,
            max_len=self.max_len,
            max_logprobs=max_logprobs,
            sleeps=self._sleeps,
            node=node,
            welcome=welcome,
        )
        os.environ |= {SERVER_PID: str(os.getpid()), "VLLM_RPC_BASE_PATH": folder}
        log_of_start = StartLog()
        build = partial(AsyncLLM.from_engine_args, args, stat_loggers=[lambda *_: self._stats])
        try:
            self._llm: AsyncLLM = await unless_failed(build, self._failure)
        except EngineFailedError:
            raise
        except (ValueError, RuntimeError) as error:
            raise EngineRefusalError(f"vLLM does not start: {log_of_start.told(error)}") from error
        dtype = self._llm.model_config.dtype
        self._stage = await asyncio.to_thread(HostStage, self._folder.path, dtype)
        if self._tokenizer is not None:
            self._guides = Guides(self._tokenizer, self._stage.vocab_size)
        cache = self._llm.vllm_config.cache_config
        self._capacity_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        host_bytes = float(cache.kv_offloading_size or 0.0) * 2**30
        self._host_capacity_tokens = int(host_bytes // token_bytes(content, dtype.itemsize))
        await self._call(self._llm.collective_rpc("tailrace_scale_logprobs"))
        await self._call(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        self._monitor = asyncio.create_task(self._watch_core(), name="vllm monitor")

    async def watch(self) -> NoReturn:
        """See `Engine`."""
        await asyncio.wait({self._failure})
        raise self._failure.exception() or EngineFailedError("vLLM ended")

    async def _watch_core(self) -> None:
        """Asks the core again and again, and counts looks: one that was suspended was not silent."""
        num_silent, used_s = 0, -1.0
        asking = asyncio.create_task(self._ping())
        while not self._failure.done():
            await asyncio.wait({asking}, timeout=_PING_S)
            if self._llm.errored:
                self._fail(await cause_of("vLLM's engine core died", self._group))
            elif asking.done():
                num_silent = 0
                await asyncio.sleep(_PING_S)
                asking = asyncio.create_task(self._ping())
            elif (num_silent := num_silent + 1) % _HUNG_LOOKS == 1:
                before_s, used_s = used_s, await self._of_core(processor_seconds)
                silent_s = num_silent * _PING_S
                is_idle = num_silent > 1 and used_s == before_s
                if silent_s > _STUCK_S or (is_idle and not await self._of_core(is_runnable)):
                    self._fail(f"vLLM's engine core has not answered for {silent_s:.1f} s")

    async def _ping(self) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._llm.is_paused()

    async def _of_core(self, look: Callable[[list[int]], T]) -> T:
        processes = self._llm.engine_core.resources.engine_manager.processes
        return await asyncio.to_thread(look, [process.pid for process in processes])

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(EngineFailedError(reason))
            self._failure.exception()  # `watch` may never be called

    async def _call(self, call: Awaitable[T], deadline_s: float = _CONTROL_S) -> T:
        """A control call; one that fails or takes too long ends the engine."""
        asked = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {asked, self._failure}
        await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._fail(f"vLLM has not answered a control call within {deadline_s:g} s")
            self._failure.result()
        if (error := asked.exception()) is not None:
            self._fail(await cause_of(f"vLLM failed a control call: {error}", self._group))
            self._failure.result()
        return asked.result()

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `Engine`."""
        num_waiting = len(self._calls) - self._config.max_running
        if num_waiting >= self._config.max_waiting:
            reason = f"{num_waiting} requests are waiting"
            on_chunk(failed(request.call_id, CallErrorCode.OVERLOADED, reason, _RETRY_AFTER_S))
            return
        try:
            prompt = check_request(request, self.max_len, self._stage.vocab_size, self.features)
            guide = guide_spec(request, self._guides)
        except InvalidRequestError as error:
            on_chunk(refused(request.call_id, error))
            return
        stops = None
        if request.sampling.stop and self._tokenizer is not None:
            continued = prompt[len(prompt) - request.num_continued :].tolist()
            stops = StopStrings(self._tokenizer, request.sampling.stop, continued)
        max_new = min(request.max_new_tokens, self.max_len - len(prompt))
        call = VllmCall(request, on_chunk, len(prompt), max_new, stops, self._policy_version)
        call.guide, call.vocab_size = guide, self._stage.vocab_size
        call.stream_tokens = min(STREAM_TOKENS, self._config.stream_chunk_tokens)
        self._calls[request.call_id] = call
        self._spawn(self._run(call, prompt.tolist()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._run_ended)

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"a call failed in vLLM: {error!r}")

    async def _run(self, call: VllmCall, prompt: list[int]) -> None:
        """Passes the tokens of one call on."""
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        if self._config.kv_on_update == "keep":  # old keys and values must not serve new calls
            asked["cache_salt"] = str(self._policy_version)
        try:
            try:
                queue = await self._llm.add_request(call.request.call_id, asked, call.sampling())
            except (ValueError, VLLMClientError) as error:  # refused by vLLM
                self._end(call, failed(call.request.call_id, CallErrorCode.INVALID, str(error)))
                return
            call.internal_id = queue.request_id
            if call.is_aborted:
                await self._llm.abort(call.request.call_id)
            ended = False
            while not ended:
                ended = await self._forward(call, await queue.get())
        except EngineDeadError:  # the calls end with the service
            self._fail(await cause_of("vLLM's engine core died", self._group))

    async def _forward(self, call: VllmCall, output: Any) -> bool:
        """Sends the new tokens of an output of vLLM; True after the last chunk."""
        made = output.outputs[0]
        if made.finish_reason == "error":  # a guided call alone can get it
            reason = "guide: no token of this vocabulary goes on with the reply"
            self._end(call, failed(call.request.call_id, CallErrorCode.INVALID, reason))
            return True
        ids, reason = list(made.token_ids), made.finish_reason
        count, stop = find_stop(call.stops, ids, reason == "stop")
        spans = version_spans(self._version_starts(call, made), call.num_sent, count)
        chunk = call.chunk(made, count, spans, self._counts)
        if self._config.kv_on_update == "keep":
            self._counts.stale += call.num_stale(spans)
        if stop is None and reason is None:
            call.on_chunk(chunk)
            return False
        if reason is None or count < len(ids):
            await self._llm.abort(call.request.call_id)
        num_cached = output.num_cached_tokens or 0
        self._counts.prefix_hit += num_cached
        last = msgspec.structs.replace(
            chunk,
            finish_reason=FinishReason("stop" if stop is not None else reason),
            stop_matched=stop or made.stop_reason,
            num_cached_tokens=num_cached,
            queue_s=queue_s(output.metrics),
        )
        self._end(call, last)
        return True

    def _version_starts(self, call: VllmCall, made: Any) -> list[tuple[int, int]]:
        """Versions of a call with the first token of each."""
        if made.weight_versions is not None:
            return [(int(span.version), span.start) for span in made.weight_versions]
        state = self._llm.output_processor.request_states[call.internal_id]
        return [(int(version), start) for version, start in state.weight_version_starts]

    def _end(self, call: VllmCall, chunk: TokenChunk) -> None:
        """Sends the last chunk of a call."""
        if self._calls.pop(call.request.call_id, None) is not None:
            self._counts.finished += 1
            self._counts.prompt += call.num_prompt
            call.on_chunk(chunk)

    def abort(self, call_id: str) -> None:
        """See `Engine`."""
        if (call := self._calls.get(call_id)) is not None:
            call.is_aborted = True
            if call.internal_id:
                self._spawn(self._tell(self._llm.abort(call_id)))

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """See `Engine`."""
        ids = [release_id(one) for one in episode_ids]
        self._spawn(self._tell(self._llm.engine_core.abort_requests_async(ids)))

    async def _tell(self, message: Awaitable[None]) -> None:
        with contextlib.suppress(EngineDeadError):
            await message

    def open_call_ids(self) -> list[str]:
        """See `StagedEngine`."""
        return list(self._calls)

    async def apply(self) -> float:
        """See `Engine`."""
        async with self._control:
            policy_version, path = self.take_staged()
            recompute = self._config.kv_on_update == "recompute"
            began_s, core = time.perf_counter(), self._llm.engine_core
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=recompute))
            await self._call(self._llm.collective_rpc("tailrace_load", args=(str(path),)))
            await self._call(self._llm.update_weight_version(str(policy_version)))
            if recompute:
                self._count_recomputed()
            self._policy_version = policy_version
            if not self._is_paused:
                await self._call(self._llm.resume_generation())
            return time.perf_counter() - began_s

    async def pause(self) -> None:
        """See `Engine`."""
        async with self._control:
            self._is_paused = True
            core = self._llm.engine_core
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """See `Engine`."""
        async with self._control:
            self._is_paused = False
            if self._policy_version >= 0:
                await self._call(self._llm.resume_generation())

    def allow_sleep(self) -> None:
        """See `Engine`."""
        self._sleeps = True

    async def sleep(self) -> None:
        """See `Engine`. vLLM has memory to give back on accelerators alone."""
        async with self._control:
            core = self._llm.engine_core
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=True))
            self._count_recomputed()
            if self._llm.model_config.enable_sleep_mode:
                await self._call(core.sleep_async(1, "keep"))

    async def wake(self) -> None:
        """See `Engine`. vLLM may resume by itself."""
        async with self._control:
            if self._llm.model_config.enable_sleep_mode:
                await self._call(self._llm.wake_up())

    def _count_recomputed(self) -> None:
        begun = (call for call in self._calls.values() if call.num_sent)
        self._counts.recomputed += sum(call.num_prompt + call.num_sent for call in begun)

    def stats(self) -> EngineStats:
        """See `Engine`."""
        counts, seen, num_open = self._counts, self._stats, len(self._calls)
        return EngineStats(
            policy_version=self._policy_version,
            capacity_tokens=self._capacity_tokens,
            max_sequence_tokens=self.max_len,
            used_tokens=int(seen.usage * self._capacity_tokens) if num_open else 0,
            num_running=min(seen.num_running, num_open),
            num_waiting=max(num_open - seen.num_running, 0),
            num_steps=seen.num_steps,
            step_s=seen.step_s,
            num_read_tokens=int(seen.read_usage * self._capacity_tokens),
            num_generated_tokens=counts.generated,
            num_prompt_tokens=counts.prompt,
            num_prefix_hit_tokens=counts.prefix_hit,
            num_computed_tokens=counts.computed,
            num_recomputed_tokens=counts.recomputed,
            num_stale_kv_tokens=counts.stale,
            num_preemptions=seen.num_preemptions,
            num_preempted_tokens=int(seen.preempted_usage * self._capacity_tokens),
            host_capacity_tokens=self._host_capacity_tokens,
            num_drafted_tokens=seen.num_drafted,
            num_accepted_tokens=seen.num_accepted,
            num_finished=counts.finished,
            num_nonfinite_logprobs=counts.nonfinite,
        )

    async def close(self) -> None:
        """See `Engine`."""
        self._monitor.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait({self._monitor, *self._tasks})
        if self._failure.done():  # it may be stopped, and would not hear
            for process in self._llm.engine_core.resources.engine_manager.processes:
                process.kill()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        await asyncio.to_thread(self._llm.shutdown)
        if self._group is not None:
            await self._group.close()
        self._stage.close()
        self._folder.remove()
