"""`tailrace export`: a checkpoint as a plain Hugging Face model, without what only training needs."""

import importlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import given_folder, newest_checkpoint
from tailrace_cli.commands.options import (
    Checkpoint,
    ConfigName,
    ConfigPath,
    ExperimentArgument,
    Overrides,
)
from tailrace_cli.console import stdout
from tailrace_cli.experiment import Experiment, load_given
from tailrace_cli.validation import check_experiment

_PART = ".part"  # holds the model while it is written


def export(
    to: Annotated[str, typer.Option(help="New folder for the model.")],
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "",
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; default: as they were trained."),
    ] = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Write a checkpoint as a plain Hugging Face model: weights, configuration, tokenizer."""
    loaded = load_given(experiment, overrides, config_path, config_name)
    check_experiment(loaded)
    export_model(loaded, to, stdout, checkpoint=checkpoint, dtype=dtype)


def export_model(
    experiment: Experiment, target: str, console: Console, *, checkpoint: str, dtype: str
) -> None:
    """Write weights in `dtype` (empty: as trained) and tokenizer to `target`, which must be new."""
    source = given_folder(checkpoint) if checkpoint else newest_checkpoint(experiment.run.run_dir)
    folder = Path(os.path.expanduser(target))
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ConfigError(f"--checkpoint {source} is no model directory: it has no {name}")
    if folder.exists() and any(path.name != _PART for path in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    plain_model: Any = importlib.import_module("tailrace_cli.plain_model")  # torch takes seconds
    plain_model.copy(source, folder / _PART, dtype)
    for path in (folder / _PART).iterdir():
        path.rename(folder / path.name)
    (folder / _PART).rmdir()
    console.print(f"{source} -> {folder}", soft_wrap=True)
