"""Gauges of this machine: use of things that the kernel counts for all processes together.

Invariants: all but one of them bound growth of a call only while others free nothing. `allocated_bytes`
never falls: memory of any kind that a call has more by now was allocated in between. Hence the sandbox
lets a call have no memory that is there already: no huge pages of the pool, no shared ones.
"""

import itertools
import os
import re
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_BYTES = 1 << 16
_SOCKETS, _KERNEL_KIB = b"sockets: used ", b"SUnreclaim:"
_PAGES = re.compile(rb"\npgalloc_\w+ (\d+)")
_STALLS = b"\ncompact_stall "  # the page of any size that one of them brings is counted nowhere else
_UNKNOWN = 1 << 40
_ENDLESS = itertools.count(_UNKNOWN, _UNKNOWN)


class Machine(NamedTuple):
    """Use at one time; what the kernel does not tell grows without an end."""

    num_sockets: int
    kernel_bytes: int  # that it cannot reclaim, mappings among them
    allocated_bytes: int  # since the machine started, whether freed or not


class Gauges:
    """Reads them again and again, of the network and the machine that this process is in."""

    def __init__(self) -> None:
        self._sockets = _open("/proc/self/net/sockstat")
        self._memory = _open("/proc/meminfo")
        self._events = _open("/proc/vmstat")
        self._load = _open("/proc/loadavg")

    def read(self) -> Machine:
        """Use now."""
        return Machine(
            _number_after(_SOCKETS, _read(self._sockets)),
            1024 * _number_after(_KERNEL_KIB, _read(self._memory)),
            _allocated_bytes(self._read_events()),
        )

    def last_process(self) -> int:
        """Number of the process or thread that began last, as far as this process sees others."""
        words = _read(self._load).split()
        return int(words[-1]) if words else next(_ENDLESS)

    def _read_events(self) -> bytes:
        """Events up to the stalls, which are on the first page of most kernels."""
        text = piece = _read(self._events)
        while piece and _STALLS not in text:
            text += (piece := _read(self._events, len(text)))
        return text


def _allocated_bytes(events: bytes) -> int:
    pages = [int(number) for number in _PAGES.findall(events)]
    if not pages:
        return next(_ENDLESS)
    stalls = _number_after(_STALLS, events) if _STALLS in events else 0
    return sum(pages) * PAGE_BYTES + stalls * _UNKNOWN


def _open(path: str) -> int:
    """Descriptor; -1 where there is no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return -1


def _read(fd: int, offset: int = 0) -> bytes:
    return os.pread(fd, _MOST_BYTES, offset) if fd >= 0 else b""


def _number_after(name: bytes, text: bytes) -> int:
    found = text.partition(name)[2].split(None, 1)
    return int(found[0]) if found else next(_ENDLESS)
