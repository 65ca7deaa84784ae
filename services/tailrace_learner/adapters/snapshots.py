"""Copies of a model on the host for a checkpoint: weights and the moments of the optimizer, in full.

Names are those of the Hugging Face model; tied weights share memory as they do in the model. Nothing
may compute during a copy; afterwards training may go on.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tailrace.config import ConfigError
from tailrace_learner.adapters import lora
from tailrace_learner.adapters.hf_model import TrainableModel
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.core.model.critic import Critic
from tailrace_learner.core.step.optimizer import SummedOptimizer

OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"
_RNG = "rng.torch"
_NAME = "optimizer"  # in the metadata of a file of moments
_FIRST_NAME = "adamw"  # of files without metadata


class Snapshot(NamedTuple):
    """A model at one moment; empty on all ranks but the first."""

    loaded: TrainableModel  # architecture and tokenizer; its weights move on
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # "<parameter>.<moment>", and the random generator
    others: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})  # files of other models
    optimizers: Mapping[str, str] = MappingProxyType({})  # name of the optimizer by file of moments

    def metadata(self, file: str) -> dict[str, str] | None:
        """Metadata of a file: the optimizer whose moments it holds."""
        return {_NAME: self.optimizers[file]} if file in self.optimizers else None


def take_snapshot(loaded: TrainableModel, strategy: Strategy, optimizer: str = _FIRST_NAME) -> Snapshot:
    """Copy the model and its optimizer, named `optimizer` (collective).

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
    return Snapshot(loaded, weights, moments, others, {OPTIMIZER_FILE: optimizer})


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


def load_optimizer(
    path: Path, loaded: TrainableModel, strategy: Strategy, optimizer: str = _FIRST_NAME
) -> None:
    """Restore the moments and the random generator, saved by any number of ranks.

    `ConfigError` if they do not fit, or are of another optimizer than the one named `optimizer`.
    """
    file_path = path / OPTIMIZER_FILE
    check_optimizer_name(file_path, optimizer)
    try:
        with safe_open(file_path, framework="pt") as file:
            torch.set_rng_state(file.get_tensor(_RNG))
            stored: dict[str, list[str]] = {}
            for key in file.keys():  # noqa: SIM118  a file is no mapping
                name, _, moment = key.rpartition(".")
                stored.setdefault(name, []).append(moment)
            for name, parameter in loaded.model.named_parameters():
                kept = {moment: file.get_tensor(f"{name}.{moment}") for moment in stored.get(name, ())}
                if not kept:
                    continue  # a parameter that never had a gradient
                shape = strategy.shape(parameter)
                if any(_is_of_another(value, shape) for value in kept.values()):
                    raise ConfigError(
                        f"resume_from_checkpoint: {path}: optimizer state of {name} has another shape"
                    )
                strategy.set_moments(parameter, kept)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume_from_checkpoint: {file_path}: {error}") from error


def check_optimizer_name(path: Path, optimizer: str) -> None:
    """Raise `ConfigError` if a file holds the moments of an optimizer of another name."""
    try:
        with safe_open(path, framework="pt") as file:
            saved = (file.metadata() or {}).get(_NAME, _FIRST_NAME)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume_from_checkpoint: {path}: {error}") from error
    if saved != optimizer:
        raise ConfigError(
            f"resume_from_checkpoint: {path} holds the moments of optimizer {saved!r}, the experiment "
            f"names {optimizer!r}: name the saved one, or begin a new run with pretrain: {path.parent}"
        )


def critic_tensors(critic: Critic, optimizer: SummedOptimizer) -> dict[str, dict[str, Tensor]]:
    """Copy weights and moments to the host, by file and name; a shared trunk is left out."""
    weights = {name: _host_copy(parameter) for name, parameter in critic.named_parameters.items()}
    moments = {
        f"{name}.{moment}": _host_copy(value)
        for name, parameter in critic.named_parameters.items()
        for moment, value in optimizer.moments(parameter).items()
    }
    return {CRITIC_FILE: weights, CRITIC_OPTIMIZER_FILE: moments}


def load_critic(folder: Path, critic: Critic, optimizer: SummedOptimizer, optimizer_name: str) -> None:
    """Restore the tensors of `critic_tensors`; `ConfigError` if they are missing or do not fit."""
    if not (folder / CRITIC_FILE).is_file():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} has no critic, it was saved by a run without one: begin "
            f"a new run with pretrain: {folder}, or drop learner.critic"
        )
    check_optimizer_name(folder / CRITIC_OPTIMIZER_FILE, optimizer_name)
    try:
        weights, moments = (load_file(folder / file) for file in (CRITIC_FILE, CRITIC_OPTIMIZER_FILE))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"resume_from_checkpoint: critic of {folder}: {error}") from error
    _check(folder, weights, critic)
    for name, parameter in critic.named_parameters.items():
        with torch.no_grad():
            parameter.copy_(weights[name])
        kept = {key.rpartition(".")[2]: key for key in moments if key.rpartition(".")[0] == name}
        if kept:
            device = parameter.device
            on_device = {moment: moments[key].to(device) for moment, key in kept.items()}
            optimizer.set_moments(parameter, on_device)


def _check(folder: Path, weights: dict[str, Tensor], critic: Critic) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: tuple(p.shape) for name, p in critic.named_parameters.items()}
    if shapes != wanted:
        name = min(n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n))
        raise ConfigError(
            f"resume_from_checkpoint: {folder} holds another critic ({name}: {shapes.get(name)}, here "
            f"{wanted.get(name)}): give learner.critic as it was"
        )


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _is_of_another(moment: Tensor, shape: tuple[int, ...]) -> bool:
    """True for a moment of a parameter of another shape; one of whole rows or columns has size 1."""
    pairs = zip(moment.shape, shape, strict=False)
    return moment.dim() == len(shape) and any(size not in (1, wanted) for size, wanted in pairs)
