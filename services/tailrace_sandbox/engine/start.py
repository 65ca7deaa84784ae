"""The zygote's start: from a fresh interpreter to a process that waits for its first call."""

import gc
import importlib
import json
import os
import platform
import resource
import socket
import sys
from dataclasses import dataclass

from tailrace_sandbox.core.policy import Confinement
from tailrace_sandbox.engine import child, kernel
from tailrace_sandbox.engine.confine import Plan
from tailrace_sandbox.engine.group import CallGroup, enter
from tailrace_sandbox.engine.zygote import Zygote

CONTROL_FD = 3
SHARED_USER_HEADROOM = 24
_NO_LIMIT = 1 << 22
_WARM = (
    "ast", "base64", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math",
    "operator", "random", "re", "shutil", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "time", "traceback", "typing",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Parameters of a zygote's start; travels as JSON on its command line."""

    base: str  # folder for the folders of calls
    uid: int  # user to become; negative: stay
    landlock: bool
    seccomp: bool
    counts_forks: bool
    group: str  # folder of its cgroup; empty: none
    group_counts_processes: bool
    readable: tuple[str, ...]  # besides the system and the interpreter
    preload: tuple[str, ...]  # modules that every call finds imported


def main(argument: str) -> None:
    """Run the zygote of the process at the other end of descriptor 3."""
    start = Start(**json.loads(argument))
    control = socket.socket(fileno=CONTROL_FD)
    control.set_inheritable(False)
    if start.group:
        enter(start.group)
    else:
        kernel.use_small_pages()
    _become(start.uid)
    child.prepare()
    for module in (*_WARM, *start.preload):
        importlib.import_module(module)
    kernel.adopt_orphans()
    kernel.run_in_short_turns()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # it watches each process by two files
    kernel.use_few_arenas()
    abi = kernel.landlock_abi() if start.landlock else 0
    confinement = Confinement(platform.machine(), start.uid >= 0, abi)
    paths = (sys.prefix, sys.base_prefix, *start.readable)
    plan = Plan.make(
        confinement,
        paths,
        seccomp=start.seccomp,
        counts_forks=start.counts_forks,
        num_processes_outside=_processes_outside(start),
        limits_processes=start.uid >= 0 or start.counts_forks or start.group_counts_processes,
    )
    # Modules that nobody here knows may have hooks to run at a fork.
    zygote = Zygote(control, plan, start.base, os.fork if start.preload else kernel.fork)
    gc.collect()
    gc.freeze()  # calls share this memory as long as nobody writes to it
    zygote.try_out()
    group = CallGroup(start.group) if start.group else None
    control.send(b"ready")
    zygote.serve(group)


def _become(uid: int) -> None:
    """Be `uid` (negative: who we are), without groups and capabilities."""
    kernel.bar_capabilities()
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.allow_inspection()
    kernel.drop_capabilities()


def _processes_outside(start: Start) -> int:
    """Number of this user's processes outside the call: the zygote alone, if the user is its own.

    Otherwise the kernel also counts those of other containers, which are invisible here. The fork gate
    or a cgroup counts without it. Where there is none, ask the kernel: fork below the limit fails. Some
    are added for those that start later.
    """
    if start.uid >= 0:
        return 1
    if os.getuid() == 0:
        raise OSError("the kernel never limits the processes of root: run the sandbox as another user")
    if start.counts_forks or start.group_counts_processes:
        return _NO_LIMIT
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_fork(middle) else (middle + 1, high)
    return low + SHARED_USER_HEADROOM


def _can_fork(limit: int) -> bool:
    """Tell whether a process may fork under this limit of processes."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            grandchild = os.fork()
            if grandchild:
                os.waitpid(grandchild, 0)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
