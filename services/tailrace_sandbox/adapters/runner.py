"""Runs calls on zygotes, a bounded number at once, and opens sessions.

Invariants: a zygote serves one call at a time and is reused only after a call that ended in order; a
cancelled call ends with everything that it started; a call whose zygote is lost runs again, once, on
another: the second time it counts as the call's own fault.
"""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from tailrace.log import get_logger
from tailrace_sandbox import metrics
from tailrace_sandbox.adapters.groups import ZygoteGroup
from tailrace_sandbox.adapters.pipes import Output
from tailrace_sandbox.adapters.place import Place
from tailrace_sandbox.adapters.session import PythonSession
from tailrace_sandbox.adapters.zygote import ZygoteClient
from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import files
from tailrace_sandbox.ports import TOOLS, Execution, SandboxLostError, Work

log = get_logger(__name__)

_GRACE_S = 10.0  # beyond a call's own time, until its zygote counts as lost
_DRAIN_S = 10.0
_COLLECT_S = 10.0
_MAX_LOSSES = 2


class Owned:
    """A zygote with its group and the claim to its user."""

    def __init__(
        self, zygote: ZygoteClient, group: ZygoteGroup | None, claim: socket.socket | None
    ) -> None:
        self.zygote = zygote
        self._group = group
        self._claim = claim
        self._limited: tuple[int, int, int] | None = None  # bounds that the group has

    def limit(self, limits: Limits) -> None:
        """Give the group the bounds of the next call."""
        bounds = limits.memory_bytes, limits.disk_bytes, limits.max_processes
        if self._group is not None and bounds != self._limited:
            self._group.limit(limits)
            self._limited = bounds

    async def close(self) -> None:
        """End it, remove its group, then give its user back."""
        await self.zygote.close()
        if self._group is not None:
            await self._group.remove()
        if self._claim is not None:
            self._claim.close()


class Runner:
    """`Sandbox` on the zygotes of this service."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._config = place.config
        self._room = asyncio.Semaphore(place.config.max_concurrency)
        self._session_room = asyncio.Semaphore(place.config.max_sessions)
        self._idle: list[Owned] = []
        self._closing: set[asyncio.Task[None]] = set()

    def limits(self, mode: str, wall_s: float) -> Limits:
        """Of a call of this mode that may take `wall_s`."""
        given = self._config.limits_of(TOOLS[mode])
        return Limits(
            wall_s=min(wall_s, given.max_wall_s),
            cpu_s=given.cpu_s,
            memory_bytes=given.memory_bytes,
            max_processes=given.max_processes,
            disk_bytes=given.disk_bytes,
            max_files=given.max_files,
            max_open_files=given.max_open_files,
            max_mappings=given.max_mappings,
            max_output_bytes=given.max_output_bytes,
        )

    async def start(self) -> None:
        """See `Sandbox`. Starts one zygote: mistakes show now and the first call need not wait."""
        async with self._zygote(self.limits("python", 0)):
            pass

    async def run(self, work: Work) -> Execution:
        """See `Sandbox`."""
        for _ in range(_MAX_LOSSES):
            limits = self.limits(work.mode, work.wall_s)
            async with self._zygote(limits) as zygote:
                started_s = time.perf_counter()
                try:
                    outcome = await self._run(zygote, work, limits)
                except SandboxLostError as error:
                    zygote.is_lost = True
                    log.warning("the process of a call was lost", reason=str(error))
                    continue
                metrics.CALL_SECONDS.labels(work.mode).observe(time.perf_counter() - started_s)
                return outcome
        return Execution(-signal.SIGKILL, reason="lost")

    async def open_session(self, mode: str = "session", image: str = "") -> PythonSession:
        """See `Sandbox`. Waits until there is room for one more session."""
        if mode != "session" or image:
            raise ValueError("sandbox.backend process has no images: use docker or agent_sandbox")
        given = self._config.limits_of(TOOLS[mode])
        limits = self.limits(mode, given.max_wall_s)
        await self._session_room.acquire()
        with ExitStack() as undo:
            undo.callback(self._session_room.release)
            owned = await self._started(limits)
            undo.pop_all()
        metrics.SESSIONS.inc()

        async def end() -> None:
            metrics.SESSIONS.dec()
            closing = self._close(owned)
            closing.add_done_callback(lambda _: self._session_room.release())
            await asyncio.shield(closing)  # it ends also if nobody waits for it

        return PythonSession(owned.zygote, limits, given.max_transfer_bytes, end)

    async def close(self) -> None:
        """End all idle zygotes and remove the folder; calls must be over."""
        await self.close_processes()
        self._place.remove()

    async def close_processes(self) -> None:
        """End all idle zygotes; the next call starts one."""
        while self._idle:
            self._close_later(self._idle.pop())
        await asyncio.gather(*self._closing)

    async def _started(self, limits: Limits) -> Owned:
        place = self._place
        async with AsyncExitStack() as undo:
            uid, claim = place.claim_user()
            if claim is not None:
                undo.callback(claim.close)
            group = place.groups.make() if place.groups is not None else None
            if group is not None:
                undo.push_async_callback(group.remove)
            zygote = await ZygoteClient.start(place.python, place.start_argument(uid, group))
            if group is not None:
                undo.push_async_callback(zygote.close)
            owned = Owned(zygote, group, claim)
            owned.limit(limits)
            undo.pop_all()
        return owned

    @asynccontextmanager
    async def _zygote(self, limits: Limits) -> AsyncIterator[ZygoteClient]:
        async with self._room:
            while self._idle and self._idle[-1].zygote.is_lost:
                self._close_later(self._idle.pop())
            owned = self._idle.pop() if self._idle else await self._started(limits)
            ended_in_order = False
            try:
                owned.limit(limits)
                yield owned.zygote
                ended_in_order = True
            finally:
                if ended_in_order:
                    self._idle.append(owned)
                else:
                    self._close_later(owned)

    def _close_later(self, owned: Owned) -> None:
        if owned.zygote.is_lost:
            metrics.LOST_ZYGOTES.inc()
        self._close(owned)

    def _close(self, owned: Owned) -> asyncio.Task[None]:
        task = asyncio.create_task(owned.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _run(self, zygote: ZygoteClient, work: Work, limits: Limits) -> Execution:
        def kill() -> None:
            zygote.tell(op="kill", reason="output")

        outputs = (Output(limits.max_output_bytes, kill), Output(limits.max_output_bytes, kill))
        try:
            zygote.start_call(
                work.mode, work.payload, work.stdin, limits, outputs,
                closes_after=not work.outputs,
            )  # fmt: skip
            ended = await zygote.ended(limits.wall_s + _GRACE_S)
            await _at_end(outputs)
            found = await self._collect(zygote, work) if work.outputs else _NOTHING
        finally:
            for output in outputs:
                output.close()
        (stdout, is_cut), (stderr, is_cut_too) = outputs[0].take(), outputs[1].take()
        return Execution(
            ended.exit_code, stdout, stderr, ended.reason, is_cut or is_cut_too, found.files,
            found.refused,
        )  # fmt: skip

    async def _collect(self, zygote: ZygoteClient, work: Work) -> files.Collected:
        """Files of the call that ended, read by another confined process; then the folder goes."""
        max_bytes = self._config.limits_of(TOOLS[work.mode]).max_transfer_bytes
        payload = {"patterns": work.outputs, "max_bytes": max_bytes}
        limits = self.limits(work.mode, _COLLECT_S)
        outputs = (Output(max_bytes + files.MAX_OTHER_BYTES, lambda: None), Output(4096, lambda: None))
        try:
            zygote.start_call("collect", payload, "", limits, outputs, closes_after=True)
            await zygote.ended(_COLLECT_S + _GRACE_S)
            await _at_end(outputs)
            return files.unpacked(outputs[0].take_bytes())
        except ValueError:  # it was ended, for example by a pattern that takes too long
            return files.Collected(0, {}, tuple(work.outputs))
        finally:
            for output in outputs:
                output.close()


_NOTHING = files.Collected(0, {}, ())


async def _at_end(outputs: tuple[Output, Output]) -> None:
    """Wait until all output has been read; every writer is dead."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            for output in outputs:
                await output.ended.wait()
    except TimeoutError as error:
        raise SandboxLostError("a call's output stayed open after its end") from error
