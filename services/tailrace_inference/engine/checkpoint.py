"""Engine from a model directory, for a process without a learner (`tailrace episode`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.loaded_model import name_ties, unfit_weights
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine


class CheckpointError(ValueError):
    """A model directory cannot be loaded; the message names it and the reason."""


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def engine_from_checkpoint(path: Path, config: InferenceConfig) -> TorchEngine:
    """Builds an engine with a Hugging Face directory's weights (as version 0) and tokenizer."""
    config_file, tokenizer_file = path / "config.json", path / "tokenizer.json"
    if not config_file.is_file():
        raise CheckpointError(f"{path} is not a model directory: it has no config.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    model = _loaded(path)
    engine = TorchEngine.from_config_json(_config_json(config_file, model), config, tokenizer)
    engine.stage(_tensors(model), 0)
    engine.apply()
    engine.attach()
    return engine


def _loaded(path: Path) -> Any:
    """The model of a directory; `CheckpointError` if weights cannot be read or are missing."""
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with foreign_code("transformers"):
            model, info = load(
                path,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are named here
                output_loading_info=True,
                trust_remote_code=False,  # no question on the terminal
            )
    except ForeignCodeError as error:
        raise CheckpointError(f"the weights in {path} cannot be loaded: {error.error}") from error
    if reason := unfit_weights(model, info):
        raise CheckpointError(f"{path} {reason}")
    return model


def _config_json(file: Path, model: Any) -> bytes:
    """The file's content, with what is true of the weights: whether the output matrix is tied."""
    if not name_ties(model):
        return file.read_bytes()
    content = json.loads(file.read_bytes())
    for part in (content, content.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    return json.dumps(content).encode()


def _tensors(model: torch.nn.Module) -> Iterator[_Tensor]:
    for name, tensor in model.state_dict().items():
        data = memoryview(tensor.float().contiguous().numpy()).cast("B")
        yield _Tensor(name, "float32", tuple(tensor.shape), data)
