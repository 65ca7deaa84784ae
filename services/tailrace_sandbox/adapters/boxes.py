"""Sandbox on boxes: containers of a runtime that can run a command line, one box per call or session.

Invariants: a box serves one call or one session and is removed after it, also when the call is
cancelled; between the calls of a session nothing in its box runs, where the runtime can stop it; what a
box says is bytes of bounded size.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

from tailrace.log import get_logger
from tailrace_sandbox import metrics
from tailrace_sandbox.adapters.box import Box, Boxes
from tailrace_sandbox.adapters.box_calls import called
from tailrace_sandbox.config import CallLimits, SandboxConfig
from tailrace_sandbox.ports import TOOLS, Execution, SandboxLostError, Work

log = get_logger(__name__)

_MAX_LOSSES = 2
_KEPT = ("", "interrupted", "stopped")  # ends of calls that leave their session alive


class BoxSandbox:
    """`Sandbox` on boxes."""

    def __init__(self, boxes: Boxes, config: SandboxConfig) -> None:
        self._boxes = boxes
        self._config = config
        self._room = asyncio.Semaphore(config.max_concurrency)
        self._session_room = asyncio.Semaphore(config.max_sessions)
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See `Sandbox`."""
        await self._boxes.start()

    async def run(self, work: Work) -> Execution:
        """See `Sandbox`."""
        async with self._room:
            for _ in range(_MAX_LOSSES):
                box = await self._boxes.open(work.mode, "")
                began_s = time.perf_counter()
                try:
                    outcome = await called(box, work, self._config.limits_of(TOOLS[work.mode]))
                except SandboxLostError as error:
                    metrics.LOST_ZYGOTES.inc()
                    log.warning("the container of a call was lost", reason=str(error))
                    continue
                finally:
                    self._close_later(box)
                metrics.CALL_SECONDS.labels(work.mode).observe(time.perf_counter() - began_s)
                return outcome
        return Execution(-signal.SIGKILL, reason="lost")

    async def open_session(self, mode: str = "session", image: str = "") -> "BoxSession":
        """See `Sandbox`. Waits until there is room for one more session."""
        await self._session_room.acquire()
        with ExitStack() as undo:
            undo.callback(self._session_room.release)
            session = BoxSession(
                lambda: self._boxes.open(mode, image),
                self._config.limits_of(TOOLS[mode]),
                self._close_later,
                self._session_room.release,
            )
            await session.open()
            undo.pop_all()
        metrics.SESSIONS.inc()
        return session

    async def close(self) -> None:
        """See `Sandbox`."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._boxes.close()

    def _close_later(self, box: Box) -> asyncio.Task[None]:
        task = asyncio.create_task(box.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task


class BoxSession:
    """`SandboxSession` in a box of its own, stopped between calls. A new box follows one that ended.

    One whose call was cancelled or lost is over, so that the model is told. `remove` begins to remove a
    box, which ends also if the session's caller does not wait for it; `release` gives the room back.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Box]],
        limits: CallLimits,
        remove: Callable[[Box], asyncio.Task[None]],
        release: Callable[[], None],
    ) -> None:
        self._make = make
        self._limits = limits
        self._remove = remove
        self._release = release
        self._box: Box | None = None
        self._is_closed = self._is_paused = False
        self._is_lost = False  # with a call that has no outcome

    async def open(self) -> Box:
        """The box, made if there is none."""
        if self._box is None:
            self._box, self._is_paused = await self._make(), False
        return self._box

    async def execute(self, work: Work) -> Execution:
        """See `SandboxSession`."""
        if self._is_closed or self._is_lost:
            raise SandboxLostError("the session is over")
        box, goes_on = await self.open(), False
        self._is_lost = True
        try:
            if self._is_paused:
                await box.resume()
                self._is_paused = False
            outcome = await called(box, work, self._limits)
            self._is_lost = False
            goes_on = outcome.reason in _KEPT and not outcome.ended_session
            if goes_on:
                self._is_paused = goes_on = await _is_stopped(box)
        finally:
            if not goes_on:
                self._box = None
                await asyncio.shield(self._remove(box))
        return outcome if goes_on else replace(outcome, ended_session=True)

    async def close(self) -> None:
        """See `SandboxSession`."""
        if self._is_closed:
            return
        self._is_closed = True
        metrics.SESSIONS.dec()
        if self._box is None:
            self._release()
            return
        removing = self._remove(self._box)
        removing.add_done_callback(lambda _: self._release())
        await asyncio.shield(removing)


async def _is_stopped(box: Box) -> bool:
    """Stop everything in a box; a session in which that fails ends."""
    try:
        await box.pause()
    except SandboxLostError as error:
        log.warning("a session ends because its container does not stop", reason=str(error))
        return False
    return True
