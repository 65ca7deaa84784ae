"""Copies of checkpoints as plain Hugging Face models; imports torch."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.loaded_model import unfit_weights


def copy(source: Path, target: Path, dtype: str) -> None:
    """Write weights in `dtype` (empty: as they are) and tokenizer to `target`, replacing it.

    `ConfigError` if the model is not whole, or the disk does not take it; `target` is gone then.
    """
    model = _loaded(source, dtype)
    shutil.rmtree(target, ignore_errors=True)
    try:
        with foreign_code("transformers"):
            model.save_pretrained(target)
            AutoTokenizer.from_pretrained(source).save_pretrained(target)
    except ForeignCodeError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(
            f"--to {target.parent} was not written: {error.error}: free space on its disk, or name a "
            "folder of another one"
        ) from error


def _loaded(source: Path, dtype: str) -> Any:
    """The whole model; `ConfigError` if some of its weights are missing or torn."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = AutoModelForCausalLM.from_pretrained
    wanted = getattr(torch, dtype) if dtype else "auto"
    try:
        with foreign_code("transformers"):
            model, info = load(
                source,
                dtype=wanted,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are named here
                output_loading_info=True,
            )
    except ForeignCodeError as error:
        raise ConfigError(
            f"the weights in {source} cannot be loaded: {error.error}: name a complete --checkpoint"
        ) from error
    if reason := unfit_weights(model, info):
        raise ConfigError(f"--checkpoint {source} {reason}")
    return model
