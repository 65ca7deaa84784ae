"""Checks of `tailrace doctor --engine` that depend on the model."""

from __future__ import annotations

import pytest

from tailrace_inference.adapters.engine_checks import Calls, Check, _refused_update
from tailrace_inference.engine.driver import EngineDriver
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
