"""The critic's part of a checkpoint: its weights and AdamW's moments, by parameter name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tailrace.config import ConfigError
from tailrace_learner.core.model.critic import Critic

CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"


def critic_tensors(critic: Critic, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Host copies by file and name; a shared trunk is the policy's and not among them."""
    weights = {name: _host_copy(parameter) for name, parameter in critic.named_parameters.items()}
    moments = {
        f"{name}.{moment}": _host_copy(value)
        for name, parameter in critic.named_parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }
    return {CRITIC_FILE: weights, CRITIC_OPTIMIZER_FILE: moments}


def load_critic(folder: Path, critic: Critic, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `critic_tensors` gave; `ConfigError` if it is not there or of another critic."""
    if not (folder / CRITIC_FILE).is_file():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} has no critic, it was saved by a run without one: begin "
            f"a new run with pretrain: {folder}, or drop learner.critic"
        )
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
            optimizer.state[parameter] = {
                moment: moments[key].to(device) for moment, key in kept.items()
            }


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
