"""`tailrace export`: a whole model that plain transformers loads, or nothing and the reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tailrace.config import ConfigError
from tailrace_cli.commands.export import export_model
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.experiment import Experiment, load
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tests.unit.tailrace_learner.factory import make_model
from tests.unit.tailrace_learner.test_checkpoints import no_room


@cache
def experiment() -> Experiment:
    return load(examples_folder() / "own_algorithm" / "experiment.yaml", [])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weights are in several files."""
    folder = tmp_path / "step_1"
    make_model("qwen3", implementation="eager").save_pretrained(folder, max_shard_size="10KB")
    build_frozen_lake_tokenizer(str(folder))
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def exported(source: Path, dtype: str = "") -> Path:
    target = source.with_name("exported")
    console = Console(file=io.StringIO())
    export_model(experiment(), str(target), console, checkpoint=str(source), dtype=dtype)
    return target


def test_the_exported_model_computes_what_the_checkpoint_does(model: Path) -> None:
    exported(model)
    plain, again = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        for folder in (model, model.with_name("exported"))
    )
    ids = torch.arange(9)[None]
    assert torch.equal(plain(input_ids=ids).logits, again(input_ids=ids).logits)
    assert {path.name for path in model.with_name("exported").iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def without_a_weight(folder: Path) -> None:
    """Writes the weights without one of them, in one file."""
    weights = {}
    for path in folder.glob("model-*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def torn(folder: Path) -> None:
    path = min(folder.glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-9])


def without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_weight, r"lacks the weights of model\.layers\.0\.self_attn\.q_proj\.weight"),
        (torn, "cannot be loaded: .*name a complete --checkpoint"),
        (without_a_tokenizer, r"no model directory: it has no tokenizer\.json"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    model: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=message):
        exported(model)
    assert not model.with_name("exported").exists()


def test_a_disk_without_room_leaves_nothing_in_the_way_of_the_next_try(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not written: .*free space"), no_room():
        exported(model)
    assert not list(model.with_name("exported").iterdir())
    exported(model, "bfloat16")
    with pytest.raises(ConfigError, match="is not empty"):
        exported(model)
