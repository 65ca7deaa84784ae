"""One thread for all that torch computes, so that the event loop stays free and memory is reused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Awaitable calls, run one after another in their own thread."""

    def __init__(self, num_threads: int) -> None:
        # OpenMP counts threads per calling thread, so the setting is made inside.
        self._executor = ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`."""
        loop = asyncio.get_running_loop()
        context = copy_context()  # its log lines carry the caller's ids
        return await loop.run_in_executor(self._executor, partial(context.run, work, *args, **kwargs))

    async def close(self) -> None:
        """Wait for what is running; what is queued is dropped."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
