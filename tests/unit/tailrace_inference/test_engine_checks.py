"""Checks of `tailrace doctor --engine` that depend on the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tailrace.config import ConfigError
from tailrace_inference.adapters.engine_checks import Calls, Check, _refused_update, _while_alive
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.engine.engine import TorchEngine
from tests.unit.tailrace_inference.harness import VOCAB_SIZE, make_engine, make_model, weights_of


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
async def test_an_incomplete_update_is_made_whatever_the_model_calls_its_layers(family: str) -> None:
    model = make_model(family)
    driver = EngineDriver(make_engine(model), in_thread=False)
    await driver.start()
    await driver.stage(iter(weights_of(model)), 2)
    await driver.apply()
    check = await _refused_update(Calls(driver, VOCAB_SIZE, 64), model)
    assert check == Check("incomplete update", "refused")
    await driver.close()


class BrokenSteps(TorchEngine):
    """An engine that dies in its first step."""

    def step(self) -> bool:
        raise RuntimeError("an illegal memory access")


async def test_an_engine_that_dies_in_the_checks_ends_them() -> None:
    engine = make_engine(make_model())
    engine.__class__ = BrokenSteps
    driver = EngineDriver(engine, in_thread=False)
    await driver.start()
    calls = Calls(driver, VOCAB_SIZE, 64)

    async def checks() -> AsyncIterator[Check]:
        yield Check("tokens", str(await calls.ask(calls.prompt())))

    async with asyncio.timeout(120):
        with pytest.raises(ConfigError, match="died in the checks: an illegal memory access"):
            await _while_alive(driver, checks())
    await driver.close()
