"""Thread in which an inference server checks and stages versions.

It has a lower priority than the threads that generate: an update that comes a little later costs
nothing, tokens do.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NICE = 5  # a third of the usual share of a busy core: versions still keep up with the learner


def _step_back() -> None:
    """Lowers the priority of this thread; those that it starts have it too."""
    if sys.platform == "linux":  # elsewhere all threads of a process have one priority
        thread_id = threading.get_native_id()
        lower = os.getpriority(os.PRIO_PROCESS, thread_id) + _NICE
        os.setpriority(os.PRIO_PROCESS, thread_id, lower)


_staging = ThreadPoolExecutor(1, "weight-staging", initializer=_step_back)


async def in_background(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `work` in that thread."""
    return await asyncio.get_running_loop().run_in_executor(_staging, partial(work, *args, **kwargs))
