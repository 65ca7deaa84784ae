"""SGLang in a thread: its event loop, its processes and its control calls.

SGLang installs signal handlers and replaces the logging of the process that starts it, and on an error
it kills that process. In a thread of its own, started here, it leaves all three to the service.

Invariants: outputs and swap counts of a call are exact, also when SGLang joins chunks or repeats the
last token of an aborted call; a call is aborted whether or not it has reached the scheduler.
"""

import asyncio
import atexit
import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ConfigureLoggingReq,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.utils import MultiprocessingSerializer

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_inference.adapters.sglang_worker import LOADER, run_scheduler
from tailrace_inference.ports import EngineFailedError

T = TypeVar("T")

_IPC = "ipc://"


class CallOutput(msgspec.Struct):
    """New tokens of a call; the last one has `finish` or `error`."""

    rid: str
    num_cached: int = 0  # prompt tokens with reused keys and values
    num_retractions: int = 0
    token_ids: list[int] = []
    logprobs: list[float] = []
    tops: list[list[tuple[float, int, None]]] = []  # likeliest tokens of each step
    finish: dict[str, Any] | None = None
    error: str = ""


class _NoDetokenizer(Engine):  # type: ignore[misc]
    """Engine with our scheduler process, and no detokenizer: tokens come from the scheduler."""

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: Any, *parts: Any, **named: Any
    ) -> tuple[Any, list[Any] | None]:
        """Moves the sockets to the model's folder: nobody would remove them where they are."""
        for key, value in vars(port_args).items():
            if isinstance(value, str) and value.startswith(_IPC):
                Path(value.removeprefix(_IPC)).unlink(missing_ok=True)
                setattr(port_args, key, f"{_IPC}{server_args.model_path}/{key}")
        started: tuple[Any, list[Any] | None] = super()._launch_scheduler_processes(
            server_args, port_args, *parts, **named
        )
        return started

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *parts: Any, **named: Any) -> tuple[list[Any], list[str]]:
        return [], []


def on_child_error(signum: int, frame: object) -> None:
    """Ignores SIGQUIT, by which a failing scheduler asks its parent to kill all: `watch` sees it."""


class SGLangThread:
    """One SGLang engine. Methods run in the caller's event loop unless they say otherwise."""

    def __init__(
        self,
        arguments: dict[str, Any],
        on_outputs: Callable[[list[CallOutput]], None],
        interval_s: float,
        chunk_tokens: int,
    ) -> None:
        self._arguments = arguments
        self._on_outputs = on_outputs
        self._interval_s = interval_s
        self._chunk_tokens = chunk_tokens
        self._made: dict[str, CallOutput] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._marks: deque[asyncio.Future[dict[str, int]]] = deque()
        self._ready: Future[None] = Future()
        self.load_snapshot: Any = None  # the scheduler's `LoadSnapshot`
        self.num_cache_tokens = 0  # with room for keys and values, once it has started

    async def start(self) -> None:
        """Starts the processes and loads the model; raises `ForeignCodeError`."""
        self._callers_loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, on_child_error)
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._ready))  # the thread sets it whoever waits

    def _run(self) -> None:
        """Body of the thread."""
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        handlers, level = logging.root.handlers[:], logging.root.level
        try:
            with foreign_code("SGLang"):
                engine = _NoDetokenizer(**self._arguments)
                pids = engine.get_all_child_pids()
                self.processes = [psutil.Process(pid) for pid in pids]  # one may have died already
                atexit.unregister(engine.shutdown)  # it kills all children of this process
                info = engine._scheduler_init_result.scheduler_infos[0]
                self.num_cache_tokens = int(info["max_total_num_tokens"])
                engine.tokenizer_manager._subprocess_watchdog.stop()
                engine.tokenizer_manager.load_snapshot_reader.read(0)  # both sides hold the file now
                Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)
                dispatcher = engine.tokenizer_manager._result_dispatcher
                dispatcher._mapping[ConfigureLoggingReq] = self._on_mark
        except (ForeignCodeError, SystemExit) as error:
            self._ready.set_exception(error)
            return
        finally:
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._loop.call_soon(self._manager.auto_create_handle_loop)  # it takes the loop that runs
        self._ready.set_result(None)
        self._loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit(self, rid: str, request: dict[str, Any], eager: bool) -> None:
        """Sends a call. `eager`: its tokens are handed over without delay."""
        self._loop.call_soon_threadsafe(self._submit, rid, request, eager)

    def abort(self, rid: str) -> None:
        """Ends a call soon; its last output has the finish type `abort`."""
        self._loop.call_soon_threadsafe(self._abort, rid)

    def close(self) -> None:
        """Kills SGLang's processes and ends the thread."""
        if not self._ready.done() or self._ready.exception() is not None:
            return
        for process in self.processes:
            try:
                family = [*process.children(recursive=True), process]
            except psutil.NoSuchProcess:
                continue
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        psutil.wait_procs(self.processes, timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    # In the thread.

    async def pause(self, mode: str) -> dict[str, int]:
        """Holds the scheduler (`retract`, `in_place`); returns `mark`."""
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        return await self.mark()

    async def resume(self) -> None:
        """Lets the scheduler go on."""
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def allow_sleep(self) -> None:
        """Lets SGLang give its memory back and keep its weights; before `start`. Not on the CPU."""
        on_gpu = self._arguments.get("device") != "cpu"
        # Without a copy on the host, the memory of weights comes back with undefined bytes.
        self._arguments |= {"enable_memory_saver": on_gpu, "enable_weights_cpu_backup": on_gpu}

    async def sleep(self) -> None:
        """Gives the memory of weights, keys and values back, with the calls retracted."""
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        if self._arguments.get("enable_memory_saver"):
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    async def wake(self) -> None:
        """Takes the memory again."""
        if self._arguments.get("enable_memory_saver"):
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())

    async def load(self, path: Path, policy_version: int, *, flush: bool) -> None:
        """Copies weights into the model of a held scheduler; raises `EngineFailedError`."""
        manager = self._manager
        payload = [(str(path), torch.empty(0))]  # for `load_staged`
        ranks = range(self._arguments.get("tp_size", 1))
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(payload) for _ in ranks],
            load_format=LOADER,
            flush_cache=flush,
            weight_version=str(policy_version),
        )
        for done, message in (
            await manager.begin_weight_update(BeginWeightUpdateReqInput()),
            await manager.update_weights_from_tensor(update),
            await manager.end_weight_update(EndWeightUpdateReqInput()),
        ):
            if not done:
                raise EngineFailedError(f"SGLang did not take version {policy_version}: {message}")

    async def mark(self) -> dict[str, int]:
        """Number of tokens by call that the scheduler had sent when it answers.

        The scheduler returns this request, which changes nothing, behind its outputs on their socket.
        """
        answer: asyncio.Future[dict[str, int]] = self._loop.create_future()
        self._marks.append(answer)
        await self._manager._async_dispatch_to_scheduler(ConfigureLoggingReq())
        return await answer

    def _on_mark(self, returned: ConfigureLoggingReq) -> None:
        answer = self._marks.popleft()
        self.load_snapshot = self._manager.load_snapshot_reader.read(0)
        if not answer.done():
            states = self._manager.rid_to_state
            answer.set_result({rid: len(state.output_ids) for rid, state in states.items()})

    def _submit(self, rid: str, request: dict[str, Any], eager: bool) -> None:
        task = self._loop.create_task(self._pump(rid, request, eager))
        self._tasks[rid] = task
        task.add_done_callback(lambda done: self._ended(rid, done))

    def _ended(self, rid: str, task: "asyncio.Task[None]") -> None:
        """Closes a call; it was cancelled before the scheduler knew it, or refused."""
        del self._tasks[rid]
        if task.cancelled():
            self._put(CallOutput(rid, finish={"type": "abort"}), eager=True)
        elif (error := task.exception()) is not None:
            self._put(CallOutput(rid, error=f"{type(error).__name__}: {error}"), eager=True)

    def _abort(self, rid: str) -> None:
        task, state = self._tasks.get(rid), self._manager.rid_to_state.get(rid)
        if state is not None and state.dispatched:
            self._manager.abort_request(rid)
        elif task is not None:
            task.cancel()

    async def _pump(self, rid: str, request: dict[str, Any], eager: bool) -> None:
        """Takes the outputs of one call."""
        num_taken = 0
        stream = await self._engine.async_generate(**request, rid=rid, stream=True, return_logprob=True)
        async for out in stream:
            meta = out["meta_info"]
            count = meta.get("completion_tokens", 0) - num_taken  # fewer than sent: repeated ones
            num_taken += count
            logprobs = [each[0] for each in meta.get("output_token_logprobs", ())[:count]]
            output = CallOutput(
                rid,
                num_cached=meta.get("cached_tokens", 0),
                num_retractions=meta.get("num_retractions", 0),
                token_ids=out["output_ids"][:count],
                logprobs=logprobs,
                tops=meta.get("output_top_logprobs", [])[:count],
                finish=meta["finish_reason"],
            )
            self._put(output, eager or output.finish is not None)

    def _put(self, output: CallOutput, eager: bool) -> None:
        """Joins an output to those that wait, and hands them over when it is time."""
        held = self._made.setdefault(output.rid, output)
        if held is not output:
            held.token_ids += output.token_ids
            held.logprobs += output.logprobs
            held.tops += output.tops
            held.num_retractions = output.num_retractions
            held.finish, held.error = output.finish, output.error
        if eager or len(held.token_ids) >= self._chunk_tokens:
            self._hand_over()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        made, self._made = list(self._made.values()), {}
        self.load_snapshot = self._manager.load_snapshot_reader.read(0)
        if made and not self._callers_loop.is_closed():
            self._callers_loop.call_soon_threadsafe(self._on_outputs, made)
