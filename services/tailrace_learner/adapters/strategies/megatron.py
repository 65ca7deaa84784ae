"""`megatron`: layers cut over neighbouring ranks by megatron-core's linear layers (extra `megatron`).

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. Each of `tensor_parallel_size` neighbours has its
share of every layer's attention heads and inner neurons, and the rest of the model whole; they compute
the same rows together. Groups of neighbours share the rows of a step. An update *sums* gradients over
the groups; core divides once, by the step's global count. It has not been run on CUDA with NCCL.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from tailrace.config import ConfigError
from tailrace.import_path import load_extra
from tailrace_learner.adapters.ranks import DataParallelRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer, squared_norms, torch_optimizer
from tailrace_learner.ports import Ranks, UpdateResult

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
# Their layers have these linear layers and no others.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_CUT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class MegatronStrategy(Strategy):
    """Tensor parallel over neighbours, data parallel over their groups."""

    def __init__(self, ranks: Ranks, args: StrategyArgs) -> None:
        key = "learner.strategy_args.strategy_name megatron"
        layers = "tailrace_learner.adapters.strategies.megatron_layers"
        self._layers = load_extra(layers, "megatron", key)
        self._size = args.tensor_parallel_size
        self.world = ranks
        self.ranks: Ranks = DataParallelRanks(ranks, self._size)
        groups: tuple[distributed.ProcessGroup, distributed.ProcessGroup]
        groups = self._layers.make_groups(self._size, args.timeout_s)
        self._neighbours, self._equals = groups

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """Cut the layers; `ConfigError` if it cannot be."""
        _check(policy.model.config, self._size)
        norms: list[nn.Parameter] = []
        for module in list(policy.model.modules()):
            for name, child in list(module.named_children()):
                if name in _COLUMNS:
                    setattr(module, name, self._layers.ColumnLinear.part_of(child, self._size))
                elif name in _ROWS:
                    setattr(module, name, self._layers.RowLinear.part_of(child, self._size))
                elif name in _HEAD_NORMS:
                    norms.append(child.weight)
        self._head_norms = norms
        return policy

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> SummedOptimizer:
        """Make the optimizer of our part; its norm is that of the whole model."""
        self._optimizer = optimizer = CutOptimizer(torch_optimizer(policy.parameters, args))
        optimizer.lay_out(self.world, self._neighbours, self._equals, self._head_norms)
        return optimizer

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the shape of all parts together."""
        dim = _cut_dim(parameter)
        return tuple(
            length * self._size if index == dim else length
            for index, length in enumerate(parameter.shape)
        )

    def _gathered(self, tensor: Tensor, like: Tensor) -> Tensor:
        if (dim := _cut_dim(like)) is None or not tensor.dim():
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        distributed.all_gather(parts, tensor.contiguous(), group=self._neighbours)
        return torch.cat(parts, dim)

    def _part(self, tensor: Tensor, like: nn.Parameter) -> Tensor:
        if (dim := _cut_dim(like)) is None:
            return tensor
        part = tensor.chunk(self._size, dim)[self._neighbours.rank()]
        # A copy does not keep the other parts alive.
        return part.clone(memory_format=torch.contiguous_format)


class CutOptimizer(SummedOptimizer):
    """Optimizer of weights that are cut over neighbours, or whole on each of them."""

    def lay_out(
        self,
        world: Ranks,
        neighbours: ProcessGroup,
        equals: ProcessGroup,
        head_norms: Sequence[nn.Parameter],
    ) -> None:
        """Set the groups: `neighbours` hold the other parts, `equals` computed other rows for our part.

        `head_norms`: whole parameters for which each neighbour has the gradient of its own heads alone.
        """
        self._world = world
        self._neighbours = neighbours
        self._equals = equals
        self._head_norms = head_norms

    @torch.no_grad()
    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """As `SummedOptimizer`, after gradients were summed over ranks (collective)."""
        _sum(self._head_norms, self._neighbours)
        _sum(self._parameters(), self._equals)
        return super().update(count=count, learning_rate=learning_rate, max_grad_norm=max_grad_norm)

    def _squares(self, grads: Mapping[nn.Parameter, Tensor]) -> list[float]:
        """Squares of the whole model: each part of a cut weight counts, a whole weight counts once."""
        size = self._neighbours.size()
        counted = [
            square / (size if _cut_dim(parameter) is None else 1)
            for parameter, square in zip(grads, squared_norms(grads.values()), strict=True)
        ]
        return [square / self._equals.size() for square in self._world.sums(counted)]


def _check(config: Any, size: int) -> None:
    """Raise `ConfigError` for a model that cannot be cut into `size` parts."""
    if config.model_type not in _FAMILIES:
        raise ConfigError(
            f"learner.strategy_args.strategy_name megatron cuts {', '.join(_FAMILIES)}, not "
            f"{config.model_type}: use fsdp2"
        )
    for name in _CUT_SIZES:
        if (length := getattr(config, name)) % size:
            common = math.gcd(*(getattr(config, key) for key in _CUT_SIZES))
            raise ConfigError(
                f"learner.strategy_args.tensor_parallel_size {size} does not divide the model's {name} "
                f"({length}): use a divisor of {common}"
            )


def _cut_dim(tensor: Tensor) -> int | None:
    """Dimension along which megatron-core cut a weight; None for a whole weight."""
    dim: int | None = getattr(tensor, "partition_dim", None)
    return dim


def _sum(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients of parameters over a group (collective)."""
    if group.size() == 1:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    works = [distributed.all_reduce(grad, group=group, async_op=True) for grad in grads]
    for work in works:
        work.wait()
