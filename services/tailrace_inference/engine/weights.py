"""Taking new weights: checked and loaded beside the active ones, then copied in between two steps.

Invariants: nothing of the active weights changes before every tensor of the update has been checked;
names that the model ties to one parameter may come once or several times, but never differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailrace_inference.ports import NamedTensor


class WeightMismatchError(ValueError):
    """An update does not fit the model; the old version stays. Attribute: `policy_version`."""

    def __init__(self, policy_version: int, reason: str) -> None:
        super().__init__(f"weights of policy version {policy_version} refused: {reason}")
        self.policy_version = policy_version


class Staged(NamedTuple):
    """A complete update on the model's device."""

    policy_version: int
    targets: list[Tensor]
    values: list[Tensor]


class WeightStage:
    """The parameters of a model by every name that an update may use for them."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        names |= {name: buffers[name] for name in model.state_dict() if name in buffers}
        self._targets: dict[str, Tensor] = names

    def load(self, tensors: Iterable[NamedTensor], policy_version: int) -> Staged:
        """Copy an update into fresh tensors of the model's type; raises `WeightMismatchError`."""
        values: dict[int, Tensor] = {}
        targets: dict[int, Tensor] = {}
        for tensor in tensors:
            target = self._targets.get(tensor.name)
            if target is None:
                raise WeightMismatchError(policy_version, f"the model has no tensor {tensor.name!r}")
            value = _read(tensor, target, policy_version)
            earlier = values.get(id(target))
            if earlier is not None and not torch.equal(earlier, value):
                raise WeightMismatchError(
                    policy_version, f"{tensor.name!r} differs from what it is tied to"
                )
            values[id(target)], targets[id(target)] = value, target
        missing = sorted(name for name, target in self._targets.items() if id(target) not in values)
        if missing:
            shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise WeightMismatchError(policy_version, f"{len(missing)} tensors are missing: {shown}")
        return Staged(policy_version, list(targets.values()), list(values.values()))


def _read(tensor: NamedTensor, target: Tensor, policy_version: int) -> Tensor:
    """The tensor's bytes as a fresh tensor of the target's shape, type and device."""
    if tuple(tensor.shape) != tuple(target.shape):
        reason = (
            f"{tensor.name!r} has shape {tuple(tensor.shape)}, the model wants {tuple(target.shape)}"
        )
        raise WeightMismatchError(policy_version, reason)
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightMismatchError(policy_version, f"{tensor.name!r} has unknown dtype {tensor.dtype!r}")
    if tensor.data.nbytes != math.prod(tensor.shape) * dtype.itemsize:
        raise WeightMismatchError(policy_version, f"{tensor.name!r} has {tensor.data.nbytes} bytes")
    value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    if value.numel():
        source = torch.frombuffer(bytearray(tensor.data), dtype=dtype)
        value.copy_(source.view(tensor.shape))
    return value
