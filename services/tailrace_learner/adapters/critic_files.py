"""Files of the critic in a checkpoint: weights and moments of its optimizer, by parameter name."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tailrace.config import ConfigError
from tailrace_learner.adapters.snapshots import check_optimizer_name
from tailrace_learner.core.model.critic import Critic
from tailrace_learner.core.step.optimizer import SummedOptimizer

CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"


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
