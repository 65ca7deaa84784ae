"""Traps of SGLang: arguments that it must not get, and models that it would load wrongly."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_protos.weights import ModelCard
from tests.contract.engine.harness import MODEL, make_card

pytestmark = pytest.mark.skipif(
    os.environ.get("TAILRACE_ENGINE") != "sglang", reason="for the environment of SGLang alone"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dp_size": 2}, "engine_args.dp_size: start one server for each data-parallel group"),
        ({"speculative_algorithm": "NGRAM"}, "engine_args.speculative_algorithm"),
        ({"model_path": "elsewhere"}, "engine_args.model_path: Tailrace sets it: remove it"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
)
async def test_arguments_that_cannot_work_are_refused_by_name(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await start_engine(make_card(), InferenceConfig(engine="sglang", engine_args=arguments))


async def test_experts_in_another_layout_are_refused() -> None:
    content = MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    card = ModelCard(json.dumps(content).encode(), {})
    with pytest.raises(ConfigError, match=r"experts.* take torch for qwen3_moe"):
        await start_engine(card, InferenceConfig(engine="sglang"))
