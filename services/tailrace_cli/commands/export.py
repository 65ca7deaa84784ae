"""`tailrace export`: a checkpoint as a plain Hugging Face model, without what only training needs."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.experiment import Experiment


def export(
    experiment: Experiment, target: str, console: Console, *, checkpoint: str, dtype: str
) -> None:
    """Write weights in `dtype` (empty: as trained) and tokenizer to `target`, which must be new."""
    source = Path(checkpoint).expanduser() if checkpoint else newest_checkpoint(experiment.run.run_dir)
    folder = Path(target).expanduser()
    if not (source / "config.json").is_file():
        raise ConfigError(f"--checkpoint {source} is no model directory: it has no config.json")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = _load(source, dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    console.print(f"{source} -> {folder}", soft_wrap=True)


def _load(source: Path, dtype: str) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        return load(source, dtype=getattr(torch, dtype) if dtype else "auto", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights in {source} cannot be loaded: {error}") from error
