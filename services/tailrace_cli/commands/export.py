"""`tailrace export`: a checkpoint as a plain Hugging Face model, without what only training needs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import newest_checkpoint
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
    source = Path(checkpoint).expanduser() if checkpoint else newest_checkpoint(experiment.run.run_dir)
    folder = Path(target).expanduser()
    if not (source / "config.json").is_file():
        raise ConfigError(f"--checkpoint {source} is no model directory: it has no config.json")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    _copy(source, folder, dtype)
    console.print(f"{source} -> {folder}", soft_wrap=True)


def _copy(source: Path, folder: Path, dtype: str) -> None:
    import torch  # seconds, which help and mistakes in the arguments need not wait
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model = load(source, dtype=getattr(torch, dtype) if dtype else "auto", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights in {source} cannot be loaded: {error}") from error
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
