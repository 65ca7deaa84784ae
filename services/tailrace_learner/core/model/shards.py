"""Tensors that may be cut over ranks, as this rank holds them."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Shard of this rank, sharing memory with the tensor; a whole tensor is its own shard."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    shard: Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO stage 3 keeps it beside the weight
    return shard
