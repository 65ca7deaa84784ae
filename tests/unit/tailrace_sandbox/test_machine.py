"""The gauge of allocated memory against this kernel: no way to take memory passes it by."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress

import pytest

from tailrace_sandbox.engine import machine
from tailrace_sandbox.engine.machine import PAGE_BYTES, Gauges

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
LIBC.mmap.restype = LIBC.mremap.restype = _ADDRESS
LIBC.mmap.argtypes = _ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
LIBC.mremap.argtypes = _ADDRESS, _SIZE, _SIZE, ctypes.c_int
LIBC.munmap.argtypes = _ADDRESS, _SIZE
LIBC.madvise.argtypes = _ADDRESS, _SIZE, ctypes.c_int
_PRIVATE, _SHARED, _POPULATE = 0x22, 0x21, 0x8000
_HUGE, _POPULATE_WRITE = 14, 23


def _map(num_bytes: int, flags: int = _PRIVATE) -> tuple[mmap.mmap, int]:
    made = mmap.mmap(-1, num_bytes, flags=flags)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))


def _touch() -> int:
    kept, address = _map(32 * MIB)
    ctypes.memset(address, 1, len(kept))
    return len(kept)


def _take_shared() -> int:
    kept, address = _map(32 * MIB, _SHARED)
    ctypes.memset(address, 1, len(kept))
    return len(kept)


def _populate() -> int:
    return len(_map(32 * MIB, _PRIVATE | _POPULATE)[0])


def _populate_by_advice() -> int:
    kept, address = _map(32 * MIB)
    assert LIBC.madvise(address, len(kept), _POPULATE_WRITE) == 0
    return len(kept)


def _take_huge_pages() -> int:
    kept, address = _map(32 * MIB)
    kept.madvise(_HUGE)
    ctypes.memset(address, 1, len(kept))
    return len(kept)


def _move() -> int:
    """A mapping that grows, as it moves if need be."""
    old, num_bytes = LIBC.mmap(None, MIB, 3, _PRIVATE, -1, 0), 32 * MIB
    new = LIBC.mremap(old, MIB, num_bytes, 1)
    ctypes.memset(new, 1, num_bytes)
    LIBC.munmap(new, num_bytes)
    return num_bytes


def _stop_sharing() -> int:
    kept = bytearray(b"x" * (32 * MIB))
    pid = os.fork()
    if pid == 0:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(kept)), 1, len(kept))
        os._exit(0)
    os.waitpid(pid, 0)
    return 2 * len(kept)


def _fork_tables() -> int:
    """Page tables of children alone: a page of them maps 2 MiB, or more where pages are larger."""
    kept, address = _map(64 * MIB)
    ctypes.memset(address, 1, len(kept))
    for _ in range(64):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(kept) + 64 * (len(kept) // (PAGE_BYTES // 8 * PAGE_BYTES)) * PAGE_BYTES


def _read_nothing() -> int:
    """Tables for pages that are only read, which no count of a process's pages shows."""
    num_bytes = 1 << 30
    kept = mmap.mmap(-1, num_bytes, flags=_PRIVATE, prot=mmap.PROT_READ)
    step = PAGE_BYTES // 8 * PAGE_BYTES
    for place in range(0, num_bytes, step):
        assert kept[place] == 0
    return num_bytes // step * PAGE_BYTES


def _write_to_memory_file() -> int:
    with open(os.memfd_create("x"), "wb") as file:
        return sum(file.write(bytes(MIB)) for _ in range(32))


def _allocate_memory_file() -> int:
    with open(os.memfd_create("x"), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 32 * MIB)
    return 32 * MIB


def _send_file() -> int:
    with tempfile.TemporaryFile() as source, open(os.memfd_create("x"), "wb") as target:
        source.write(bytes(32 * MIB))
        source.flush()
        return sum(os.sendfile(target.fileno(), source.fileno(), n * MIB, MIB) for n in range(32))


def _fill_pipes() -> int:
    kept = [os.pipe() for _ in range(64)]
    sent = sum(os.write(write, bytes(65536)) for _, write in kept)
    for fd in (fd for pair in kept for fd in pair):
        os.close(fd)
    return sent


def _fill_sockets() -> int:
    kept, sent = [socket.socketpair() for _ in range(64)], 0
    for pair in kept:
        for one in pair:
            one.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sent += one.send(bytes(65536))
    for pair in kept:
        for one in pair:
            one.close()
    return sent


WAYS = (
    _touch, _take_shared, _populate, _populate_by_advice, _take_huge_pages, _move, _stop_sharing,
    _fork_tables, _read_nothing, _write_to_memory_file, _allocate_memory_file, _send_file,
    _fill_pipes, _fill_sockets,
)  # fmt: skip


@pytest.mark.parametrize("take", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_memory_that_was_taken_and_given_back_is_in_the_gauge(take: Callable[[], int]) -> None:
    gauges = Gauges()
    before = gauges.read()
    taken_bytes = take()
    after = gauges.read()
    assert taken_bytes >= MIB
    assert after.allocated_bytes - before.allocated_bytes >= taken_bytes


def test_an_idle_moment_allocates_little() -> None:
    """The gauge tells more than that something happened: the least of many moments is small."""
    gauges = Gauges()
    grown = []
    for _ in range(50):
        before = gauges.read()
        grown.append(gauges.read().allocated_bytes - before.allocated_bytes)
    assert 0 <= min(grown) < MIB


def test_a_fork_is_seen_also_when_it_is_over() -> None:
    gauges = Gauges()
    before = gauges.last_process()
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert gauges.last_process() != before


def test_what_the_kernel_does_not_tell_grows_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda fd, offset=0: b"")
    gauges = Gauges()
    first, second = gauges.read(), gauges.read()
    assert all(later - earlier >= 1 << 40 for earlier, later in zip(first, second, strict=True))
    assert gauges.last_process() != gauges.last_process()


def test_a_page_that_compaction_brings_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter([b"a 1\npgalloc_dma 2\npgalloc_normal 3\ncompact_stall %d\n" % n for n in (7, 8)])
    gauges = Gauges()
    monkeypatch.setattr(Gauges, "_read_events", lambda self: next(texts))
    first, second = gauges.read(), gauges.read()
    assert first.allocated_bytes % (1 << 40) == 5 * PAGE_BYTES
    assert second.allocated_bytes - first.allocated_bytes >= 1 << 40


def test_events_are_read_to_the_stalls_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"nr 1\npgalloc_normal 4\ncompact_stall 0\nmore 2\n"
    monkeypatch.setattr(machine, "_read", lambda fd, offset=0: text[offset : offset + 9])
    assert Gauges().read().allocated_bytes % (1 << 40) == 4 * PAGE_BYTES
