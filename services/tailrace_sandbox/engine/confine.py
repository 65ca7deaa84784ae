"""Confining the calling process, in the one order that works.

Invariants: `confine` either installs everything that the plan names or raises `OSError`, and its caller
ends the process then; nothing that it installs can be taken back.
"""

import contextlib
import os
import resource
import socket
import sys
from dataclasses import dataclass

from tailrace_sandbox.core.limits import MIB, Limits
from tailrace_sandbox.core.policy import Confinement, filter_program, fork_gate_program
from tailrace_sandbox.engine import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8
_MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 9, 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OWN = (
    _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM
    | _REFER | _TRUNCATE
)  # fmt: skip
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals

SYSTEM_FOLDERS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives",
    "/etc/fonts",  # plots ask fontconfig, which warns without its configuration
)  # fmt: skip
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/random", "/dev/urandom")
_SHARED_DEVICE = "/dev/null"
_ADDRESS_SPACE_BYTES = 4096 * MIB
_MAX_FDS = 1 << 16
_LOCKED_BYTES = 64 * 1024
_LIMITED = (
    resource.RLIMIT_CORE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_DATA,
    resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_MSGQUEUE,
)  # fmt: skip
_NICE = 5  # tool code yields to the services beside it


def _handled(abi: int) -> int:
    """Every file access that Landlock of this ABI knows."""
    bits = 13 + (abi >= 2) + (abi >= 3)
    return (1 << bits) - 1 | (_IOCTL_DEV if abi >= 5 else 0)


@dataclass(frozen=True)
class Plan:
    """Confinement of a call; made once per zygote, since opening the paths costs most."""

    landlock_abi: int  # 0: not used
    seccomp: bool
    confinement: Confinement
    program: bytes
    # Program that lets the zygote decide on each fork; empty: the kernel's limit holds.
    fork_gate: bytes
    rules: tuple[bytes, ...]  # of Landlock, besides that of the call's folder
    max_limits: tuple[int, ...]  # of `_LIMITED`: what this process may ask for at most
    num_processes_outside: int  # of the same user, which the kernel counts together with the call's
    limits_processes: bool  # exactly: by the user's own limit, the fork gate or a cgroup

    @classmethod
    def make(
        cls,
        confinement: Confinement,
        paths: tuple[str, ...],
        *,
        seccomp: bool,
        counts_forks: bool = False,
        num_processes_outside: int,
        limits_processes: bool = False,
    ) -> "Plan":
        """For tool code that may read `paths` beside the system's own; missing ones are left out."""
        handled = _handled(confinement.landlock_abi)
        rules = [kernel.landlock_rule(_open(_SHARED_DEVICE), _READ_FILE | _WRITE_FILE)]
        for path in dict.fromkeys((*SYSTEM_FOLDERS, *SYSTEM_FILES, *paths)):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                access = _READ & handled if os.path.isdir(path) else _READ & _FILE_ONLY
                rules.append(kernel.landlock_rule(_open(path), access))
        return cls(
            confinement.landlock_abi,
            seccomp,
            confinement,
            filter_program(confinement) if seccomp else b"",
            fork_gate_program(confinement.machine) if counts_forks else b"",
            tuple(rules),
            tuple(map(_hard_limit, _LIMITED)),
            num_processes_outside,
            limits_processes,
        )


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def confine(
    plan: Plan, workspace: str, limits: Limits, gate: socket.socket, first_foreign_fd: int
) -> None:
    """Leave this process the workspace, its own children and nothing else of the machine.

    Descriptors from `first_foreign_fd` on are closed. `gate` takes the listener of the fork gate.
    """
    os.nice(_NICE)
    kernel.gain_no_privileges()
    if plan.landlock_abi:
        _restrict_files(plan, workspace)
    if plan.fork_gate:
        socket.send_fds(gate, [b"\0"], [kernel.install_listened_filter(plan.fork_gate)])
    os.closerange(first_foreign_fd, _MAX_FDS)
    _limit(limits, plan)  # after what opens files
    if plan.seccomp:
        kernel.install_filter(_program_of(plan))


def _program_of(plan: Plan) -> bytes:
    if plan.landlock_abi >= 6:
        return plan.program
    own = plan.confinement
    return filter_program(Confinement(own.machine, own.own_user, own.landlock_abi, os.getpid()))


def _restrict_files(plan: Plan, workspace: str) -> None:
    abi = plan.landlock_abi
    handled = _handled(abi)
    ruleset = kernel.landlock_create(handled, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0, abi)
    own = _open(workspace)
    for rule in plan.rules:
        kernel.landlock_allow(ruleset, rule)
    kernel.landlock_allow(ruleset, kernel.landlock_rule(own, _OWN & handled))
    kernel.landlock_restrict(ruleset)
    os.close(own)
    os.close(ruleset)


def _limit(limits: Limits, plan: Plan) -> None:
    """Limits of each single process; the zygote watches what all of them use together."""
    wanted = (
        0,
        limits.max_processes + plan.num_processes_outside,
        limits.cpu_s,
        limits.memory_bytes,
        limits.memory_bytes + _ADDRESS_SPACE_BYTES,
        limits.disk_bytes,
        limits.max_open_files,
        _LOCKED_BYTES,
        0,
    )
    for kind, value, most in zip(_LIMITED, wanted, plan.max_limits, strict=True):
        value = min(value, most)
        resource.setrlimit(kind, (value, value))


def _hard_limit(kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
