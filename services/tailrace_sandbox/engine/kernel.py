"""System calls that the standard library has no function for; each raises `OSError` when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCALL = _LIBC.syscall
_SYSCALL.restype = ctypes.c_long

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 36, 38, 22
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX = -8
_PATH_RULE = 1


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _call(number: int, *args: object) -> int:
    result = int(_SYSCALL(ctypes.c_long(number), *args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _prctl(option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if _LIBC.prctl(ctypes.c_int(option), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def landlock_abi() -> int:
    """Version of Landlock that this kernel speaks; 0 if it has none."""
    try:
        return _call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock_create(filesystem: int, network: int, scopes: int, abi: int) -> int:
    """A rule set that handles these accesses; its descriptor."""
    words = 3 if abi >= 6 else 2 if abi >= 4 else 1
    attributes = struct.pack("=QQQ", filesystem, network, scopes)[: 8 * words]
    return _call(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))


def landlock_allow(ruleset: int, path_fd: int, access: int) -> None:
    """Allow `access` at and beneath the open path."""
    rule = struct.pack("=Qi", access, path_fd)
    _call(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(_PATH_RULE), rule, ctypes.c_uint(0))


def landlock_restrict(ruleset: int) -> None:
    """Confine this thread and what it forks, for ever."""
    _call(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))


def install_filter(program: bytes) -> None:
    """Filter the system calls of this thread and what it forks, for ever."""
    code = _Filter(len(program) // 8, program)
    address = ctypes.addressof(code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address)


def gain_no_privileges() -> None:
    """No program that is started from here on gets more rights, set-user-id or not."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Processes whose parents end become children of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Get the signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


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
    _call(_CAPSET[platform.machine()], header, bytes(24))


def use_few_arenas() -> None:
    """Keep glibc from reserving 64 MiB of address space per thread."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 2)
