"""Checks at the start that a checkpoint holds the model that the experiment describes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import ConfigError, RunConfig
from tailrace.log import get_logger
from tailrace_learner.adapters.hf_model import TrainableModel, build_tokenizer, scratch_architecture
from tailrace_learner.config import LearnerConfig

log = get_logger(__name__)


class IncompatibleCheckpointError(ConfigError):
    """A checkpoint holds another model than the experiment's. Attributes: `path`, `difference`."""

    def __init__(self, path: str, difference: str) -> None:
        super().__init__(
            f"resume_from_checkpoint: {path} holds another model than this experiment's: {difference}. "
            "Give the experiment that wrote it, or begin a new run with pretrain: that folder"
        )
        self.path = path
        self.difference = difference


def check_compatible(path: str, loaded: TrainableModel, run: RunConfig, config: LearnerConfig) -> None:
    """Raise `IncompatibleCheckpointError` if type, vocabulary or the shape of a weight differ.

    The check is left out if the configuration of `pretrain` cannot be loaded any more.
    """
    expected = _architecture(run, config)
    if expected is None:
        return
    found = loaded.model.config
    if found.model_type != expected.model_type:
        raise IncompatibleCheckpointError(path, f"{found.model_type}, here {expected.model_type}")
    with torch.device("meta"):
        wanted = _shapes(AutoModelForCausalLM.from_config(expected))  # type: ignore[no-untyped-call]
    shapes = _shapes(loaded.model)
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise IncompatibleCheckpointError(
                path, f"{name} is {shapes.get(name)}, here {wanted.get(name)}"
            )
    _check_tokens(path, loaded, config)


def _check_tokens(path: str, loaded: TrainableModel, config: LearnerConfig) -> None:
    """Compare the vocabularies, if the experiment makes its tokenizer itself."""
    if config.from_scratch is None:
        return
    tokens = build_tokenizer(config.from_scratch).get_vocab()
    if tokens != loaded.tokenizer.get_vocab():
        raise IncompatibleCheckpointError(path, "its tokenizer has other tokens")


def _architecture(run: RunConfig, config: LearnerConfig) -> Any:
    """Returns the configuration of a new run of this experiment; None if it cannot be loaded."""
    if config.from_scratch is not None:
        scratch = config.from_scratch
        return scratch_architecture(scratch, build_tokenizer(scratch))
    try:
        return AutoConfig.from_pretrained(str(Path(run.pretrain).expanduser()))
    except (OSError, ValueError) as error:
        log.warning("checkpoint not compared with pretrain", pretrain=run.pretrain, error=str(error))
        return None


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
