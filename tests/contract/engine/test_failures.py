"""An engine that dies or hangs is noticed, and its control calls end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import psutil
import pytest

from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.ports import EngineFailedError
from tests.contract.engine.harness import ENGINE, LONG, Bench, weights_of
from tests.world.processes import is_alive, words_of

NOTICED_S = 90.0  # of a busy machine: an engine that is not watched is never noticed


def processes(others: set[int]) -> list[psutil.Process]:
    """The processes in which an engine computes; `others` are servers of other tests."""
    children = psutil.Process().children(recursive=True)
    alive = [each for each in children if is_alive(each) and each.pid not in others]
    return [each for each in alive if "resource_tracker" not in " ".join(words_of(each))]


def wound(engine: Any, way: signal.Signals, others: set[int]) -> None:
    """Kills or stops the engine in the middle of its work."""
    if isinstance(engine, EngineDriver):
        engine.engine = BrokenSteps(engine.engine)
    for process in processes(others):
        process.send_signal(way)


class BrokenSteps:
    """A stepped engine whose steps fail."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self) -> bool:
        raise RuntimeError("broken")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


WAYS = [signal.SIGKILL] if ENGINE in ("torch", "hf") else [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_dead_or_stopped_engine_is_noticed_and_control_calls_end(way: signal.Signals) -> None:
    others = {each.pid for each in psutil.Process().children(recursive=True)}
    async with await Bench.start(max_running=8, kv_cache_tokens=4096) as bench:
        watching = asyncio.create_task(bench.engine.watch())
        asked = bench.ask([1, 2], LONG)
        await asked.begun.wait()
        await bench.engine.stage(iter(weights_of(bench.models[1])), 1)
        wound(bench.engine, way, others)
        if ENGINE not in ("torch", "hf"):
            with pytest.raises(EngineFailedError):
                async with asyncio.timeout(NOTICED_S):
                    await bench.engine.apply()
        with pytest.raises(RuntimeError) as told:
            async with asyncio.timeout(NOTICED_S):
                await watching
    if ENGINE == "vllm" and way is signal.SIGSTOP:  # by its looks, whatever the machine does
        assert "not answered for 1.2 s" in str(told.value)
    assert not processes(others)
