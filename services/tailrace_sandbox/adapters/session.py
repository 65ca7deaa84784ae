"""Python session that keeps its names between calls and is stopped while it is idle.

Every reply of the session's process is checked: it has run tool code and may send anything. A session
whose call was cancelled is never used again: its reply would pass for that of the next call.
"""

import asyncio
import marshal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tailrace_sandbox.adapters.pipes import Output
from tailrace_sandbox.adapters.zygote import START_TIMEOUT_S, ZygoteClient, ZygoteEnded
from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import files
from tailrace_sandbox.engine.call import INTERRUPT_GRACE_S
from tailrace_sandbox.engine.session import HEADER
from tailrace_sandbox.ports import Execution, SandboxLostError, Work

_GRACE_S = 10.0
_MARSHAL_FORMAT = 2
_NOTHING = files.Collected(0, {}, ())


class PythonSession:
    """`SandboxSession` on a zygote of its own; the next call restarts one that ended by itself."""

    def __init__(
        self,
        zygote: ZygoteClient,
        limits: Limits,
        max_transfer_bytes: int,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._zygote = zygote
        self._limits = limits
        self._max_transfer_bytes = max_transfer_bytes
        self._end = end
        self._channel: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._outputs: tuple[Output, Output] | None = None
        self._is_closed = False

    async def execute(self, work: Work) -> Execution:
        """See `SandboxSession`."""
        if self._zygote.is_lost or self._is_closed:
            raise SandboxLostError("the session is over")
        try:
            if self._outputs is None:
                await self._begin()
            return await self._call(work)
        except asyncio.CancelledError:
            self._zygote.tell(op="kill", reason="")
            self._zygote.is_lost = True
            raise

    async def _call(self, work: Work) -> Execution:
        wall_s = min(work.wall_s, self._limits.wall_s)
        began_s = asyncio.get_running_loop().time()
        self._zygote.tell(op="resume", wall_s=wall_s)
        replying = asyncio.create_task(self._exchange(work))
        ending = asyncio.create_task(self._zygote.ended(wall_s + INTERRUPT_GRACE_S + _GRACE_S))
        try:
            await asyncio.wait({replying, ending}, return_when=asyncio.FIRST_COMPLETED)
            if replying.done() and (reply := replying.result()) is not None:
                if reply.exit_code & files.LEFT:
                    return await self._ended(await ending, reply)
                took_s = asyncio.get_running_loop().time() - began_s
                return self._paused(reply, "interrupted" if took_s >= wall_s else "")
            if not ending.done():
                self._zygote.tell(op="kill", reason="")
            return await self._ended(await ending)
        finally:
            replying.cancel()
            ending.cancel()

    async def close(self) -> None:
        """See `SandboxSession`."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            await self._end()

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()

        def kill() -> None:
            self._zygote.tell(op="kill", reason="output")

        size = self._limits.max_output_bytes
        outputs = (Output(size, kill), Output(size, kill))
        with theirs:
            self._zygote.start_call(
                "session", {}, "", self._limits, outputs,
                channel=theirs.fileno(), closes_after=True,
            )  # fmt: skip
        self._outputs = outputs
        self._channel, self._writer = await asyncio.open_connection(sock=ours)
        await self._starts()  # which takes no time of the first call

    async def _starts(self) -> None:
        """Wait until the process can take code, which has run none; one that ended is found later."""
        assert self._channel is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._channel.readexactly(HEADER.size)
        except TimeoutError as error:
            self._zygote.is_lost = True
            raise SandboxLostError(f"a session did not start within {START_TIMEOUT_S:g} s") from error
        except (EOFError, ConnectionError):
            return

    async def _exchange(self, work: Work) -> files.Collected | None:
        """Return the process's answer; None if it is missing or malformed."""
        assert self._channel is not None
        assert self._writer is not None
        request = {
            **work.payload, "patterns": work.outputs, "max_bytes": self._max_transfer_bytes
        }  # fmt: skip
        data = marshal.dumps(request, _MARSHAL_FORMAT)
        try:
            self._writer.write(HEADER.pack(len(data)) + data)
            await self._writer.drain()
            size = HEADER.unpack(await self._channel.readexactly(HEADER.size))[0]
            if size > self._max_transfer_bytes + files.MAX_OTHER_BYTES:
                return None
            return files.unpacked(await self._channel.readexactly(size))
        except (EOFError, ConnectionError, ValueError):
            return None

    def _paused(self, reply: files.Collected, reason: str) -> Execution:
        self._zygote.tell(op="pause")
        return self._outcome(reply, reason)

    async def _ended(self, ended: ZygoteEnded, reply: files.Collected = _NOTHING) -> Execution:
        outcome = self._outcome(reply._replace(exit_code=ended.exit_code), ended.reason)
        self._forget()
        return replace(outcome, ended_session=True)

    def _outcome(self, reply: files.Collected, reason: str) -> Execution:
        assert self._outputs is not None
        for output in self._outputs:
            output.read_all()
        (stdout, is_cut), (stderr, is_cut_too) = (output.take() for output in self._outputs)
        return Execution(
            reply.exit_code, stdout, stderr, reason, is_cut or is_cut_too, reply.files, reply.refused
        )

    def _forget(self) -> None:
        """Drop what belongs to a process that is gone."""
        if self._writer is not None:
            self._writer.close()
        for output in self._outputs or ():
            output.close()
        self._channel = self._writer = self._outputs = None
