"""From fork to tool code: what a child of the zygote does, and never returns from.

Invariants: no tool code runs before `confine` returned; a child whose confinement fails says so on
standard error and exits with 125; nothing of the zygote stays open in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import files, kernel, program, session
from tailrace_sandbox.engine.confine import Plan, confine

NOT_CONFINED = 125
_NOT_FOUND = 127
_CHANNEL_FD = 3
_SHELLS = ("/bin/bash", "/bin/sh")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Order:
    """What to run; `fds`: payload, standard input, output, error and, in a session, its channel."""

    mode: str  # python, shell, session, collect
    workspace: str
    limits: Limits
    fds: tuple[int, ...]


def main(plan: Plan, order: Order) -> None:
    """Become the call. The payload is read before the descriptors are closed, and nothing else."""
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)
    _take_defaults()
    payload = json.loads(_read_all(order.fds[0]))
    last_fd = _arrange(order.fds)
    _settle(order.workspace)
    try:
        confine(plan, order.workspace, order.limits, last_fd + 1)
    except OSError as error:
        os.write(2, f"the sandbox could not confine this call: {error}\n".encode())
        os._exit(NOT_CONFINED)
    files.put(payload.get("files", {}))
    _RUN[order.mode](payload)


def _take_defaults() -> None:
    """Signals as a program expects them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_all(fd: int) -> bytes:
    pieces, offset = [], 0
    while piece := os.pread(fd, _CHUNK_BYTES, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _arrange(fds: tuple[int, ...]) -> int:
    """Put input, output, error and the channel at 0 to 3; the last of them."""
    for target, fd in enumerate(fds[1:]):
        os.dup2(fd, target, inheritable=target < _CHANNEL_FD)
    return len(fds) - 2


def _settle(workspace: str) -> None:
    os.environ.update(HOME=workspace, TMPDIR=workspace, PWD=workspace)
    os.umask(0o077)
    os.chdir(workspace)
    with contextlib.suppress(OSError):  # the first to go when the machine runs out of memory
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)


def _python(payload: dict[str, Any]) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [program.FILE_NAME]
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
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(0, os.getcwd())
    session.serve(_CHANNEL_FD)


def _collect(payload: dict[str, Any]) -> None:
    """Write the wanted files to standard output; runs confined like the call that made them."""
    sys.stdout.write(json.dumps(files.collect(payload["patterns"], payload["max_bytes"])))
    program.leave(0)


_RUN = {"python": _python, "shell": _shell, "session": _session, "collect": _collect}
