"""Registry of engines, and the check that an engine can do what the settings ask for.

An engine's module is imported when it is asked for, since each has packages of its own.
"""

import asyncio

from tailrace.config import ConfigError
from tailrace.import_path import load_object
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine, EngineFeatures, EngineRefusalError
from tailrace_protos.weights import ModelCard

# Functions or classes that make an engine of a `ModelCard` and an `InferenceConfig`.
ENGINES = {
    "torch": "tailrace_inference.engine.driver:torch_engine",
    "sglang": "tailrace_inference.adapters.sglang_engine:SGLangEngine",
}


async def start_engine(card: ModelCard, config: InferenceConfig) -> Engine:
    """Builds and starts the configured engine; raises `ConfigError`."""
    path = ENGINES.get(config.engine, config.engine)
    if ":" not in path:
        raise ConfigError(
            f"inference.engine is {config.engine!r}: take one of {', '.join(ENGINES)}, or module:Class"
        )
    make = load_object(path, "inference.engine")
    try:
        engine: Engine = await asyncio.to_thread(make, card, config)
        check_settings(config, engine.features)
        await engine.start()
    except EngineRefusalError as error:
        raise ConfigError(str(error)) from error
    return engine


def check_settings(config: InferenceConfig, features: EngineFeatures) -> None:
    """Raises `ConfigError` for a setting that the engine cannot follow."""
    default = InferenceConfig()
    for key in features.unread_settings:
        if getattr(config, key) != getattr(default, key):
            raise ConfigError(f"inference.{key} has no effect on the engine {config.engine}: remove it")
    if config.kv_on_update not in features.kv_on_update:
        raise ConfigError(
            f"inference.kv_on_update {config.kv_on_update} is not possible on the engine "
            f"{config.engine}: use {' or '.join(features.kv_on_update)}"
        )
    if config.engine_args and not features.engine_args:
        raise ConfigError(
            f"inference.engine_args: the engine {config.engine} takes none: remove "
            f"{', '.join(config.engine_args)}"
        )
