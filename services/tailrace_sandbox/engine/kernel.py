"""System calls that the standard library has no function for; each raises `OSError` when it fails."""

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Callable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_FORK = ctypes.PyDLL(None, use_errno=True).fork  # keeps the interpreter's lock: it returns twice

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 36, 38, 22
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_THP_DISABLE = 41
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_RESET_ON_FORK, _SHORTEST_TURN_NS = 1, 100_000
_SECCOMP_MODE_FILTER = 2
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 1 << 3, 1 << 5
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX = -8
_PATH_RULE = 1


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _syscall(*argument_types: Any) -> Callable[..., int]:
    """`syscall` for arguments of these types after the number: converted in C, since each call pays."""
    function = _LIBC["syscall"]
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, *argument_types)
    return function


_LIBC.prctl.argtypes = (ctypes.c_int, *(4 * (ctypes.c_ulong,)))
_create_ruleset = _syscall(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint)
_add_rule = _syscall(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_restrict_self = _syscall(ctypes.c_int, ctypes.c_uint)
_sched_setattr = _syscall(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_capset = _syscall(ctypes.c_char_p, ctypes.c_char_p)
_seccomp = _syscall(ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _prctl(option: int, value: int = 0, more: int = 0) -> None:
    _checked(_LIBC.prctl(option, value, more, 0, 0))


def fork() -> int:
    """`os.fork` without the hooks that Python runs around it, for a process with a single thread.

    The hooks touch pages all over the heap, each of which the kernel then copies. What they would do
    here is to give `random` another seed, which is left to the caller.
    """
    return _checked(_FORK())


def landlock_abi() -> int:
    """Version of Landlock that this kernel speaks; 0 if it has none."""
    try:
        return _checked(_create_ruleset(_LANDLOCK_CREATE, None, 0, 1))
    except OSError:
        return 0


def landlock_create(filesystem: int, network: int, scopes: int, abi: int) -> int:
    """A rule set that handles these accesses; its descriptor."""
    words = 3 if abi >= 6 else 2 if abi >= 4 else 1
    attributes = struct.pack("=QQQ", filesystem, network, scopes)[: 8 * words]
    return _checked(_create_ruleset(_LANDLOCK_CREATE, attributes, len(attributes), 0))


def landlock_rule(path_fd: int, access: int) -> bytes:
    """The rule that allows `access` at and beneath the open path."""
    return struct.pack("=Qi", access, path_fd)


def landlock_allow(ruleset: int, rule: bytes) -> None:
    """Add a rule."""
    _checked(_add_rule(_LANDLOCK_ADD, ruleset, _PATH_RULE, rule, 0))


def landlock_restrict(ruleset: int) -> None:
    """Confine this thread and what it forks, for ever."""
    _checked(_restrict_self(_LANDLOCK_RESTRICT, ruleset, 0))


def install_filter(program: bytes) -> None:
    """Filter the system calls of this thread and what it forks, for ever."""
    code = _Filter(len(program) // 8, program)
    address = ctypes.addressof(code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address)


def install_listened_filter(program: bytes) -> int:
    """Filter the system calls of this thread and what it forks, for ever; the listener's descriptor.

    Who listens decides on calls for which the program says so.
    """
    code = _Filter(len(program) // 8, program)
    number, address = _SECCOMP[platform.machine()], ctypes.addressof(code)
    try:  # no signal interrupts a thread whose request has been received
        return _checked(_seccomp(number, _SET_FILTER, _NEW_LISTENER | _WAIT_KILLABLE, address))
    except OSError:  # before Linux 5.19
        return _checked(_seccomp(number, _SET_FILTER, _NEW_LISTENER, address))


def gain_no_privileges() -> None:
    """No program that is started from here on gets more rights, set-user-id or not."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Processes whose parents end become children of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Get the signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def use_small_pages() -> None:
    """Give this process and its descendants no huge pages.

    One that is unmapped but for a part stays whole, and nothing in `/proc` shows the rest.
    """
    with contextlib.suppress(OSError):  # a kernel that has none
        _prctl(_PR_SET_THP_DISABLE, 1)


def run_in_short_turns() -> None:
    """Let this process, but none that it forks, run soon when it wakes, in the shortest turns.

    Its share of the processors stays the same. A kernel before Linux 6.12 does without.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack(
        "=IIQiIQQQ", 48, os.sched_getscheduler(0), _RESET_ON_FORK, nice, 0, _SHORTEST_TURN_NS, 0, 0
    )
    with contextlib.suppress(OSError):  # a container's filter or another policy has the say
        _checked(_sched_setattr(_SCHED_SETATTR[platform.machine()], 0, attributes, 0))


def allow_inspection() -> None:
    """Let the same user read this process's `/proc` entries, which a change of user forbids."""
    _prctl(_PR_SET_DUMPABLE, 1)


def bar_capabilities() -> None:
    """Let no program that is started from here on have any capability."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one, or without the right to
    with contextlib.suppress(OSError):  # none there to clear
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Give up every capability of this process for good."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_capset(_CAPSET[platform.machine()], header, bytes(24)))


def use_few_arenas() -> None:
    """Keep glibc from reserving 64 MiB of address space per thread."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 2)
