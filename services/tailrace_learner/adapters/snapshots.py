"""What a checkpoint holds of a model, copied to the host: weights and AdamW's moments, in full.

Names are those of the Hugging Face model, tied weights share memory as they do in the model. Copies
are taken while nothing computes; afterwards training may go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tailrace.config import ConfigError
from tailrace_learner.adapters import lora
from tailrace_learner.adapters.hf_model import TrainableModel
from tailrace_learner.adapters.strategies.base import Strategy

OPTIMIZER_FILE = "optimizer.safetensors"
_RNG = "rng.torch"


class Snapshot(NamedTuple):
    """A model at one moment; empty on all ranks but the first."""

    loaded: TrainableModel  # architecture and tokenizer; its weights move on
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # "<parameter>.<moment>", and the random generator
    others: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})  # files of other models


def take_snapshot(loaded: TrainableModel, strategy: Strategy) -> Snapshot:
    """Copy the model and its optimizer as they are (collective).

    The other ranks give their parts and keep nothing: the host holds the model once.
    """
    keeps = strategy.world.rank == 0
    weights = host_weights(loaded.model, strategy)
    others = {}
    adapters = dict(lora.kept_adapters(loaded.model, strategy.whole, keeps=keeps))
    if adapters:
        others[lora.LORA_FILE] = adapters
    moments = {_RNG: torch.get_rng_state()} if keeps else {}
    for name, parameter in loaded.model.named_parameters():
        found = strategy.moments(parameter)
        if keeps:
            moments |= {f"{name}.{moment}": _host_copy(value) for moment, value in found.items()}
    return Snapshot(loaded, weights, moments, others)


@torch.no_grad()
def host_weights(model: Any, strategy: Strategy) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, adapters merged into them (collective).

    Empty on all ranks but the first.
    """
    keeps = strategy.world.rank == 0
    copies: dict[int, Tensor | None] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if lora.is_adapter(name):
            continue
        if id(tensor) not in copies:
            whole = strategy.whole(tensor)
            copies[id(tensor)] = _host_copy(whole) if keeps else None
        copy = copies[id(tensor)]
        if copy is not None:
            weights[lora.plain_name(name)] = copy
    for name, merged in lora.merged(model, strategy.whole):
        if keeps:
            weights[name].copy_(merged)
    return weights


def load_optimizer(path: Path, loaded: TrainableModel, strategy: Strategy) -> None:
    """Restore the moments and the random generator; `ConfigError` if they do not fit.

    They may come from any number of ranks.
    """
    try:
        with safe_open(path / OPTIMIZER_FILE, framework="pt") as file:
            names = set(file.keys())
            torch.set_rng_state(file.get_tensor(_RNG))
            for name, parameter in loaded.model.named_parameters():
                kept = {
                    moment: file.get_tensor(f"{name}.{moment}") for moment in _moments_of(name, names)
                }
                if not kept:
                    continue  # a parameter that never had a gradient
                if tuple(kept["exp_avg"].shape) != strategy.shape(parameter):
                    raise ConfigError(
                        f"resume_from_checkpoint: {path}: optimizer state of {name} has another shape"
                    )
                strategy.set_moments(parameter, kept)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume_from_checkpoint: {path / OPTIMIZER_FILE}: {error}") from error


def _moments_of(name: str, stored: Iterable[str]) -> list[str]:
    return [moment for moment in ("exp_avg", "exp_avg_sq", "step") if f"{name}.{moment}" in stored]


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
