"""Finds out what the kernel offers here, by trying it: one JSON object on standard output."""

import ctypes
import json
import os
import platform
import socket
import sys
from collections.abc import Callable

from tailrace_sandbox.core.policy import Confinement, filter_program, fork_gate_program
from tailrace_sandbox.engine import kernel
from tailrace_sandbox.engine.forks import ForkGate

_TRIAL_UID = 64999


def main() -> None:
    """Print the features of `core.tiers.Features`."""
    is_root = os.getuid() == 0
    features = {
        "machine": platform.machine(),
        "landlock_abi": kernel.landlock_abi(),
        "seccomp": _succeeds(_install),
        "is_root": is_root,
        "own_user": is_root and _succeeds(_change_user),
        "counts_forks": _succeeds(_listen),
        "lists_children": os.path.exists(f"/proc/self/task/{os.getpid()}/children"),
    }
    sys.stdout.write(json.dumps(features))


def _succeeds(attempt: Callable[[], None]) -> bool:
    """Tell whether a child can do it."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _install() -> None:
    """A filter that really stops something."""
    kernel.gain_no_privileges()
    kernel.install_filter(filter_program(Confinement(platform.machine(), False, 0)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.socket(1, 1, 0) >= 0:
        os._exit(1)


def _listen() -> None:
    """Permit a fork of another process, as a listener of its filter."""
    kernel.gain_no_privileges()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        program = fork_gate_program(platform.machine())
        socket.send_fds(theirs, [b"\0"], [kernel.install_listened_filter(program)])
        os._exit(0 if os.fork() else 7)
    theirs.close()
    listener = socket.recv_fds(ours, 1, 1)[1][0]
    gate = ForkGate(listener, 1 << 20)
    gate.receive()
    if os.waitpid(pid, 0)[1]:
        os._exit(1)


def _change_user() -> None:
    os.setgroups([])
    os.setresgid(_TRIAL_UID, _TRIAL_UID, _TRIAL_UID)
    os.setresuid(_TRIAL_UID, _TRIAL_UID, _TRIAL_UID)
