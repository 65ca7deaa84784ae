"""Client of a zygote: its process, a socket for orders, and its reports.

Invariants: a zygote serves one call at a time; one in doubt (cancelled in a call, or silent) is never
used again; everything that it started ends with it.
"""

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.log import get_logger
from tailrace_sandbox.adapters.pipes import Output, sealed
from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import workspace
from tailrace_sandbox.ports import SandboxLostError

log = get_logger(__name__)

SERVICES_DIR = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "sandbox"}
START_TIMEOUT_S = 120.0  # it imports `sandbox.preload`, perhaps from a cold disk
_EXIT_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 65536
_FORMAT = 2  # of marshal: which every Python 3 reads


def program(module: str, argument: str = "") -> str:
    """Source that runs the engine's `module`, and nothing else of this project."""
    return (
        f"import sys; sys.path.insert(0, {str(SERVICES_DIR)!r}); "
        f"from tailrace_sandbox.engine.{module} import main; sys.path.pop(0); main({argument})"
    )


class ZygoteEnded(NamedTuple):
    """End of a call. `reason`: the limit that ended it; empty: it ended by itself."""

    exit_code: int  # negative: the signal that ended it
    reason: str


class ZygoteClient:
    """One zygote process. `start` it first."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._reports: asyncio.Queue[list[str]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fileno(), self._receive)
        self._group = 0  # of the call's processes, while there are some
        self._folder = ""  # of the last call
        self.is_lost = False

    @classmethod
    async def start(cls, python: str, argument: dict[str, Any]) -> "ZygoteClient":
        """Start and wait until it has confined a child once; raises `SandboxLostError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        environment = ENVIRONMENT | {"PATH": f"{Path(python).parent}:{ENVIRONMENT['PATH']}"}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                python, "-I", "-X", "utf8", "-c", _LAUNCH, str(theirs.fileno()),
                program("start", repr(json.dumps(argument))),
                env=environment, cwd="/", pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=sys.stderr.fileno() if _has_stderr() else asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        zygote, started = cls(process, ours), False
        try:
            await zygote._hear("ready", START_TIMEOUT_S)
            started = True
        finally:
            if not started:
                await zygote.close()
        return zygote

    def _receive(self) -> None:
        try:
            data = self._control.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self.is_lost = True
            self._reports.put_nowait(["lost"])
            return
        op, _, values = data.decode().partition(" ")
        if op == "started":
            group, self._folder = values.split(" ", 1)
            self._group = int(group)
        else:
            self._group = 0
            self._reports.put_nowait([op, *values.split(" ")])

    async def ended(self, timeout_s: float) -> ZygoteEnded:
        """The end of the call; raises `SandboxLostError`."""
        exit_code, reason = await self._hear("ended", timeout_s)
        return ZygoteEnded(int(exit_code), reason)

    async def _hear(self, op: str, timeout_s: float) -> list[str]:
        """Return the next report, which must be `op`."""
        try:
            async with asyncio.timeout(timeout_s):
                found, *values = await self._reports.get()
        except TimeoutError as error:
            self.is_lost = True
            raise SandboxLostError(f"the sandbox did not answer within {timeout_s:g} s") from error
        if found != op:
            self.is_lost = True
            raise SandboxLostError("the sandbox's process ended")
        return values

    def tell(self, **message: Any) -> None:
        """Give an order."""
        with contextlib.suppress(OSError):  # lost: `ended` says so
            self._control.send(marshal.dumps(message, _FORMAT))

    def start_call(
        self,
        mode: str,
        payload: dict[str, Any],
        stdin: str,
        limits: Limits,
        outputs: tuple[Output, Output],
        *,
        channel: int = -1,
        closes_after: bool = False,
    ) -> None:
        """Begin; `outputs` become its standard output and error."""
        fds = [sealed(marshal.dumps(payload, _FORMAT)), sealed(stdin.encode())]
        ends = [output.write_fd for output in outputs]
        message = {"op": "start", "mode": mode, "limits": limits.values, "closes_after": closes_after}
        try:
            extra = [channel] if channel >= 0 else []
            socket.send_fds(self._control, [marshal.dumps(message, _FORMAT)], [*fds, *ends, *extra])
        except OSError as error:
            self.is_lost = True
            raise SandboxLostError("the sandbox's process ended") from error
        finally:
            for fd in fds:
                os.close(fd)
            for output in outputs:
                output.close_write_end()

    async def close(self) -> None:
        """End it: it ends its call, removes the folder and exits when its socket closes."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.error("sandbox process killed", pid=self._process.pid)
            self._process.kill()
            await self._process.wait()
        if self._process.returncode:
            self._clean_up()

    def _clean_up(self) -> None:
        """Do what a zygote does at its end, for one that was killed: its call's processes live on."""
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        if self._folder:
            with contextlib.suppress(OSError):  # gone, or processes that are dying still write there
                workspace.remove(self._folder)


_LAUNCH = (
    "import os, sys; fd = int(sys.argv[1]); code = sys.argv[2]; "
    "fd == 3 or (os.dup2(fd, 3), os.close(fd)); sys.argv[:] = ['']; exec(code)"
)


def _has_stderr() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
