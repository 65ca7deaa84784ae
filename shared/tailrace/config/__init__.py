"""Experiment files: strict decoding into frozen Structs, with errors that name the remedy.

An experiment file has the keys of the run at the top (`RunConfig`) and one section for each service.
A service decodes `RunConfig` and its own section, and never reads the others. Unknown keys are errors
that name the key, the file and the closest valid key.
"""

from tailrace.config.base import Config, ConfigError, InvalidConfigError
from tailrace.config.experiment import (
    SECTIONS,
    decode_config,
    load_experiment,
    run_config,
    section_config,
)
from tailrace.config.run import (
    MAX_EVAL_EPISODES,
    ChatArgs,
    Endpoints,
    EvaluationArgs,
    RunConfig,
    TracingArgs,
    advertised_host,
    secret_variable,
    this_host_id,
)

__all__ = [
    "MAX_EVAL_EPISODES",
    "SECTIONS",
    "ChatArgs",
    "Config",
    "ConfigError",
    "Endpoints",
    "EvaluationArgs",
    "InvalidConfigError",
    "RunConfig",
    "TracingArgs",
    "advertised_host",
    "decode_config",
    "load_experiment",
    "run_config",
    "secret_variable",
    "section_config",
    "this_host_id",
]
