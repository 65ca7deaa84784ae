"""The same call as a Ray actor: an async actor, numpy arrays in and out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from benchmarks.transport.payload import GENERATED, LOGPROBS

Arrays = tuple[NDArray[np.int32], NDArray[np.float32]]


class ZeroComputeActor:
    """Answers at once."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()

    async def generate(self, prompt_ids: NDArray[np.int32]) -> Arrays:
        """The same arrays for every prompt."""
        assert len(prompt_ids)
        return GENERATED, LOGPROBS


def start_actor() -> Callable[[NDArray[np.int32]], Awaitable[Arrays]]:
    """A Ray of its own on this machine with one actor; returns the call."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    decorate: Any = ray.remote
    actor = decorate(num_cpus=1, max_concurrency=1000)(ZeroComputeActor).remote()
    ray.get(actor.generate.remote(GENERATED))

    async def call(prompt_ids: NDArray[np.int32]) -> Arrays:
        answer: Arrays = await actor.generate.remote(prompt_ids)
        return answer

    return call
