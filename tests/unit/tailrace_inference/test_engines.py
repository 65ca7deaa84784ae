"""Choice of the engine, and refusals of settings that it cannot follow."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace_inference.adapters.engines import check_settings, start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.ports import EngineFeatures, EngineRefusalError
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_inference.harness import config_json

CARD = ModelCard(config_json(), {})
SMALL = {"max_running": 4, "kv_cache_tokens": 256}


class Own:
    """An engine from outside of the repository."""

    features = EngineFeatures(engine_args=True)

    def __init__(self, card: ModelCard, config: InferenceConfig) -> None:
        self.card, self.config = card, config

    async def start(self) -> None:
        if "no" in self.config.engine_args:
            raise EngineRefusalError("this model is too wide: take another one")


async def test_torch_is_the_engine_unless_another_is_named() -> None:
    engine = await start_engine(CARD, InferenceConfig(**SMALL))
    assert isinstance(engine, EngineDriver)
    assert engine.stats().capacity_tokens == 256
    await engine.close()


async def test_an_engine_of_the_users_gets_the_card_and_the_arguments() -> None:
    config = InferenceConfig(engine=f"{__name__}:Own", engine_args={"depth": 3})
    engine = await start_engine(CARD, config)
    assert isinstance(engine, Own)
    assert engine.card is CARD
    assert engine.config.engine_args == {"depth": 3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": f"{__name__}:Owned"}, "did you mean 'Own'"),
        ({"engine": f"{__name__}:Own", "engine_args": {"no": 1}}, "too wide: take another one"),
        ({"engine_args": {"block_size": 16}}, "engine torch takes none: remove block_size"),
    ],
)
async def test_what_cannot_start_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await start_engine(CARD, InferenceConfig(**SMALL, **settings))


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="engine is 'vlm': take one of torch, vllm, sglang, hf, or"):
        InferenceConfig(engine="vlm")


def test_settings_beyond_the_features_are_refused_by_name() -> None:
    features = EngineFeatures(kv_on_update=("recompute",), unread_settings=("forward",))
    check_settings(InferenceConfig(), features)
    with pytest.raises(ConfigError, match=r"inference\.forward has no effect on the engine torch"):
        check_settings(InferenceConfig(forward="rows"), features)
    with pytest.raises(ConfigError, match=r"kv_on_update keep is not possible .*: use recompute"):
        check_settings(InferenceConfig(kv_on_update="keep"), features)
    with pytest.raises(ConfigError, match=r"weights_dtype float8_e4m3fn: the engine torch does not"):
        check_settings(InferenceConfig(weights_dtype="float8_e4m3fn"), features)
