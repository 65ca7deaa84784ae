"""Megatron-core's linear layers with the interface that decoders of Hugging Face expect.

This file imports megatron-core, an extra, so `megatron.py` imports it only when it is needed.
"""

from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def make_groups(size: int, timeout_s: float) -> tuple[ProcessGroup, ProcessGroup]:
    """Make the group of `size` neighbours that share layers, and that of ranks with our part
    (collective).
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    neighbours: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    equals: ProcessGroup = parallel_state.get_data_parallel_group()
    return neighbours, equals


class _Plain:
    """Adapter of both kinds of layers: returns a tensor, has only weights as state, works with any
    autocast.
    """

    get_extra_state = nn.Module.get_extra_state  # megatron-core's puts a None among the weights

    def forward(self, input: Tensor) -> Tensor:
        """Returns the output alone; megatron-core also returns a bias for the caller to add."""
        output: Tensor = super().forward(input)[0]  # type: ignore[misc]
        return output

    def _forward_impl(
        self, *, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any
    ) -> Any:
        """Cast before the product: its backward supports the autocast of CUDA alone."""
        compute = super()._forward_impl  # type: ignore[misc]
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return compute(input=input, weight=weight, bias=bias, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return compute(input=input.to(dtype), weight=weight.to(dtype), bias=bias, **kwargs)


class ColumnLinear(_Plain, ColumnParallelLinear):  # type: ignore[misc]
    """This rank's outputs: [..., K] -> [..., N / ranks]."""

    @classmethod
    def part_of(cls, linear: nn.Linear, size: int) -> "ColumnLinear":
        """Make our outputs of a layer that all `size` ranks have in full."""
        layer = cls(**_as(linear, size))
        if linear.bias is not None:
            layer.bias.data.copy_(linear.bias.detach().chunk(size)[layer.tp_group.rank()])
        layer.to(linear.weight.device)
        return layer


class RowLinear(_Plain, RowParallelLinear):  # type: ignore[misc]
    """Sum over the ranks' products of their inputs: [..., K / ranks] -> [..., N]."""

    @classmethod
    def part_of(cls, linear: nn.Linear, size: int) -> "RowLinear":
        """Make our inputs of a layer that all `size` ranks have in full; its bias stays whole."""
        layer = cls(**_as(linear, size), input_is_parallel=True, skip_bias_add=False)
        if linear.bias is not None:
            layer.bias.data.copy_(linear.bias.detach())
        layer.to(linear.weight.device)
        return layer


def _as(linear: nn.Linear, size: int) -> dict[str, Any]:
    """Arguments of a megatron-core layer that replaces a layer of torch."""
    return {
        "input_size": linear.in_features,
        "output_size": linear.out_features,
        # On the CPU each rank is given the whole weight and keeps its part, whatever the device.
        "config": ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True),
        "init_method": lambda whole: whole.copy_(linear.weight.detach()),
        "bias": linear.bias is not None,
    }
