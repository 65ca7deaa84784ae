"""The model of an experiment without its weights, built on torch's meta device."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tailrace.chat.model_files import read_model_card
from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.model_facts import refusal
from tailrace_learner.adapters.hf_model import build_tokenizer, scratch_architecture
from tailrace_protos.weights import ModelCard


def num_parameters(config_json: bytes, experiment: Experiment, key: str) -> int:
    """Builds the architecture and counts its parameters, tied ones once.

    `ConfigError` names `key` and the reason if it cannot be built.
    """
    scratch = experiment.learner.from_scratch
    if scratch is not None and not experiment.run.pretrain:
        config = scratch_architecture(scratch, build_tokenizer(scratch))
    else:
        config = _known(config_json, key)
    make: Any = AutoModelForCausalLM.from_config
    try:
        with foreign_code("transformers"), torch.device("meta"):
            model = make(config, attn_implementation="eager")
    except ForeignCodeError as error:
        raise ConfigError(f"{key}: a {config.model_type} cannot be built: {error.error}") from error
    _check_adapters(model, experiment)
    return sum(each.numel() for each in model.parameters())


def converted_card(folder: Path, key: str) -> ModelCard:
    """Model card of a folder whose tokenizer has no `tokenizer.json`."""
    try:
        with foreign_code("transformers"):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ForeignCodeError as error:
        raise ConfigError(
            f"{key}: the tokenizer in {folder} cannot be loaded: {error.error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="tailrace-tokenizer-") as written:
        tokenizer.save_pretrained(written)
        (Path(written) / "config.json").write_bytes((folder / "config.json").read_bytes())
        return read_model_card(Path(written))


def _known(config_json: bytes, key: str) -> Any:
    content = json.loads(config_json)
    given = {name: value for name, value in content.items() if name != "model_type"}
    try:
        with foreign_code("transformers"):
            return AutoConfig.for_model(content.get("model_type", ""), **given)
    except ForeignCodeError as error:
        raise ConfigError(f"{key}: config.json: {refusal(error.error, content)}") from error


def _check_adapters(model: Any, experiment: Experiment) -> None:
    """Raises `ConfigError` if no linear layer has a name of `learner.lora.target_modules`."""
    lora = experiment.learner.lora
    if lora is None or lora.target_modules == ("all-linear",):
        return
    layers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if not layers & {name.rpartition(".")[2] for name in lora.target_modules}:
        raise ConfigError(
            "learner.lora.target_modules: the model has no linear layer of these names: use some of "
            f"{', '.join(sorted(layers))}, or all-linear"
        )
