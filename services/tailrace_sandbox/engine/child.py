"""From fork to tool code: the path of a zygote's child, which never returns.

Invariants: no tool code runs before `confine` returned; a child whose confinement fails says so on
standard error and exits with 125; nothing of the zygote stays open in it.
"""

import _signal  # type: ignore[import-not-found]
import contextlib
import marshal
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import files, kernel, program, session
from tailrace_sandbox.engine.confine import Plan, confine

NOT_CONFINED = 125
_NOT_FOUND = 127
_CHANNEL_FD = 3
_SHELLS = ("/bin/bash", "/bin/sh")
_reseed = super(random.Random, random._inst).seed


@dataclass(frozen=True)
class Order:
    """Program to run; `fds`: payload, standard input, output, error and, in a session, its channel."""

    mode: str  # python, shell, session, collect
    workspace: str
    limits: Limits
    fds: Sequence[int]


def main(plan: Plan, order: Order, gate: socket.socket) -> None:
    """Become the call. The payload is read before the descriptors are closed, and nothing else."""
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)
    _take_defaults()
    payload = marshal.loads(_read_all(order.fds[0]))
    last_fd = _arrange(order.fds)
    _settle(order.workspace)
    try:
        confine(plan, order.workspace, order.limits, gate, last_fd + 1)
    except OSError as error:
        os.write(2, f"the sandbox could not confine this call: {error}\n".encode())
        os._exit(NOT_CONFINED)
    try:
        files.put(payload.get("files", {}))
    except ValueError as error:
        os.write(2, f"{error}\n".encode(errors="replace"))
        os._exit(1)
    attempt = program.Attempt()
    with attempt:  # around what tool code can disturb by its signal handlers, or by a lack of memory
        _RUN[order.mode](payload)
    program.flush()
    os._exit(attempt.exit_code)


def prepare() -> None:
    """Do in the zygote the work that every child inherits."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
    os.umask(0o077)
    sys.argv = [program.FILE_NAME]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _take_defaults() -> None:
    """Signals as a program expects them, and random numbers that no other call has.

    By the functions in C below those of the library: see `kernel.fork`.
    """
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _reseed()


def _read_all(fd: int) -> bytes:
    pieces, offset, size = [], 0, os.fstat(fd).st_size
    while offset < size and (piece := os.pread(fd, size - offset, offset)):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _arrange(fds: Sequence[int]) -> int:
    """Put input, output, error and the channel at 0 to 3; the last of them."""
    for target, fd in enumerate(fds[1:]):
        os.dup2(fd, target, inheritable=target < _CHANNEL_FD)
    return len(fds) - 2


def _settle(workspace: str) -> None:
    os.chdir(workspace)
    try:  # the first to go when the machine runs out of memory
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    os.write(fd, b"1000")
    os.close(fd)


def _python(payload: dict[str, Any]) -> None:
    sys.path.insert(0, os.getcwd())
    attempt = program.run(payload["code"], program.fresh_main())
    program.leave(attempt.exit_code)


def _shell(payload: dict[str, Any]) -> None:
    for shell in _SHELLS:
        with contextlib.suppress(FileNotFoundError):
            os.execv(shell, [shell, "-c", payload["command"]])
    os.write(2, b"no shell here\n")
    os._exit(_NOT_FOUND)


def _session(payload: dict[str, Any]) -> None:
    sys.path.insert(0, os.getcwd())
    session.serve(_CHANNEL_FD)


def _collect(payload: dict[str, Any]) -> None:
    """Write the wanted files to standard output; runs confined like the call that made them."""
    left = memoryview(files.collect(0, payload["patterns"], payload["max_bytes"]))
    while left:
        left = left[os.write(1, left) :]
    program.leave(0)


_RUN = {"python": _python, "shell": _shell, "session": _session, "collect": _collect}
