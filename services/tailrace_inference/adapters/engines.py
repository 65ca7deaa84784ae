"""Start of the configured engine, and the check that it can do what the settings ask for."""

import asyncio

from tailrace.config import ConfigError
from tailrace.import_path import load_object
from tailrace_inference.adapters.node_link import Node
from tailrace_inference.config import ENGINES, InferenceConfig
from tailrace_inference.ports import Engine, EngineFeatures, EngineFollower, EngineRefusalError
from tailrace_protos.weights import ModelCard

_FOLLOWERS = {"vllm": "tailrace_inference.adapters.vllm_follower:VllmFollower"}


async def start_engine(card: ModelCard, config: InferenceConfig, *, sleeps: bool = False) -> Engine:
    """Builds and starts the configured engine; raises `ConfigError`.

    `sleeps`: its `sleep` will be called.
    """
    make = load_object(ENGINES.get(config.engine, config.engine), "inference.engine")
    try:
        engine: Engine = await asyncio.to_thread(make, card, config)
        check_settings(config, engine.features)
        if sleeps:
            check_sleep(config, engine.features)
            engine.allow_sleep()
        await engine.start()
    except EngineRefusalError as error:
        raise ConfigError(str(error)) from error
    return engine


def make_follower(card: ModelCard, config: InferenceConfig, node: Node) -> EngineFollower:
    """Builds the part of an engine on several nodes that this node computes."""
    make = load_object(_FOLLOWERS[config.engine], "inference.engine")
    made: EngineFollower = make(card, config, node)
    return made


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
    if config.weights_dtype not in features.weights_dtypes:
        raise ConfigError(
            f"inference.weights_dtype {config.weights_dtype}: the engine {config.engine} does not take "
            f"weights of this type: use {' or '.join(features.weights_dtypes)}"
        )
    if config.engine_args and not features.engine_args:
        raise ConfigError(
            f"inference.engine_args: the engine {config.engine} takes none: remove "
            f"{', '.join(config.engine_args)}"
        )


def check_sleep(config: InferenceConfig, features: EngineFeatures) -> None:
    """Raises `ConfigError` if the engine cannot give its memory to the learner."""
    if not features.sleep:
        raise ConfigError(
            f"colocated: the engine {config.engine} cannot give its memory to the learner: use torch, "
            "hf, vllm or sglang, or set colocated: false and give both devices of their own"
        )
