"""The model of an episode in the terminal: a checkpoint in this very process."""

from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from tailrace.chat import Renderer, TemplateError
from tailrace.config import ConfigError
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.experiment import Experiment
from tailrace_inference.adapters.local_policy import LocalPolicy
from tailrace_inference.engine.checkpoint import CheckpointError, engine_from_checkpoint
from tailrace_protos.weights import ModelCard

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class LocalModel:
    """A model folder with what plays it; `policy` is an async context manager."""

    folder: Path
    renderer: Renderer
    policy: LocalPolicy


def load_model(experiment: Experiment, checkpoint: str) -> LocalModel:
    """The model of `--checkpoint`, else of the run's newest checkpoint, else of `pretrain`."""
    folder = _model_folder(experiment, checkpoint)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        renderer = Renderer.from_model_card(_model_card(folder), experiment.run.chat)
        engine = engine_from_checkpoint(folder, experiment.inference)
    except (CheckpointError, TemplateError) as error:
        raise ConfigError(str(error)) from error
    return LocalModel(folder, renderer, LocalPolicy(engine))


def _model_card(folder: Path) -> ModelCard:
    """The model card of a Hugging Face model directory."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no model directory: it holds no {name}")
    present = (name for name in TOKENIZER_FILES if (folder / name).is_file())
    files = {name: (folder / name).read_bytes() for name in present}
    return ModelCard((folder / "config.json").read_bytes(), files)


def _model_folder(experiment: Experiment, checkpoint: str) -> Path:
    run = experiment.run
    if checkpoint:
        return Path(checkpoint)
    try:
        return newest_checkpoint(run.run_dir)
    except ConfigError:
        if run.pretrain:
            return Path(run.pretrain)
        raise
