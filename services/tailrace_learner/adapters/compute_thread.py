"""The thread in which torch computes, and the allocator that keeps its memory.

One thread for all of torch leaves the event loop free and reuses memory. Every pass allocates the same
activations again. By default glibc returns large blocks to the kernel each time and maps them again,
page by page; for small models that costs more than the computation.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MIB = 1 << 20


class ComputeThread:
    """Awaitable calls, run one after another in a thread of their own."""

    def __init__(self, num_threads: int) -> None:
        # OpenMP counts threads per calling thread, so the setting is made inside.
        self._executor = ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` and return its result."""
        loop = asyncio.get_running_loop()
        context = copy_context()  # its log lines carry the caller's ids
        return await loop.run_in_executor(self._executor, partial(context.run, work, *args, **kwargs))

    async def close(self) -> None:
        """Wait for the running call; drop the queued ones."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed memory; False where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    settings = (
        (_M_ARENA_MAX, 1),  # heaps of other threads are small and shrink eagerly
        (_M_MMAP_THRESHOLD, 32 * _MIB),  # the largest that glibc accepts
        (_M_TRIM_THRESHOLD, 1024 * _MIB),
        (_M_TOP_PAD, 64 * _MIB),
    )
    return all(library.mallopt(option, value) == 1 for option, value in settings)
