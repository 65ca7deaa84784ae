"""The model of an episode in the terminal: a checkpoint in this very process."""

from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from tailrace.chat import Renderer, TemplateError
from tailrace.config import ConfigError
from tailrace_cli.experiment import Experiment
from tailrace_inference.adapters.local_policy import LocalPolicy
from tailrace_inference.engine.checkpoint import CheckpointError, engine_from_checkpoint
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.ports import EngineRefusalError
from tailrace_protos.weights import ModelCard


@dataclass(frozen=True)
class LocalModel:
    """A model folder with what plays it; `policy` is an async context manager."""

    folder: Path
    renderer: Renderer
    policy: LocalPolicy


def load_model(experiment: Experiment, folder: Path, card: ModelCard) -> LocalModel:
    """Load the model of a folder; `ConfigError` if the engine or the template cannot."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        renderer = Renderer.from_model_card(card, experiment.run.chat)
        engine = engine_from_checkpoint(folder, experiment.inference)
    except (CheckpointError, EngineRefusalError, TemplateError) as error:
        raise ConfigError(str(error)) from error
    return LocalModel(folder, renderer, LocalPolicy(EngineDriver(engine, in_thread=False)))
