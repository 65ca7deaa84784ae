"""Weight updates: checked and loaded beside the active weights, then copied between two steps.

An update is whole, or holds only adapters (`<layer>.lora_A.weight`, `<layer>.lora_B.weight`) and names
their base version; then W + B A becomes active. B includes the scale.

Invariants: no active weight changes before all tensors of the update are checked; names that the model
ties to one parameter may occur once or several times, but never differ; the base weights of adapters
are kept unchanged, so that rounding errors do not accumulate. Matrices of float8 numbers come with
scales (`tailrace.weights.target_types`) and are widened.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailrace.weights.target_types import BLOCK, SCALE, scale_shape
from tailrace_inference.ports import NamedTensor, WeightMismatchError

UInt8Array = NDArray[np.uint8]
_STREAM: Any = torch.cuda.Stream  # has no types

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


class Staged(NamedTuple):
    """A complete update on the model's device."""

    policy_version: int
    targets: list[Tensor]
    values: list[Tensor]


class _Base(NamedTuple):
    """Base weights of later adapters by layer, from a whole update."""

    policy_version: int
    weights: dict[str, Tensor]


class WeightStage:
    """Parameters of a model by all names that an update may use.

    Updates are loaded onto `device`, that of the model if it is None.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        names: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        names |= {name: buffers[name] for name in model.state_dict() if name in buffers}
        self.targets: dict[str, Tensor] = names
        self._device = device
        self._base = _Base(-1, {})
        self._stream: Any = None  # of copies on CUDA; torch reuses memory within one stream alone

    @property
    def base_version(self) -> int:
        """The base version for adapters; -1: none."""
        return self._base.policy_version

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds on the device: parameters, and the base of adapters."""
        return [*self.targets.values(), *self._base.weights.values()]

    def load(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> Staged:
        """Copies an update into new tensors of the model's type; raises `WeightMismatchError`.

        `base_version`: base of the adapters; None: the update is whole.
        """
        with self._beside_steps():
            return self._load(tensors, policy_version, base_version)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """On CUDA, copies on a stream of its own, so that no step waits for them; waits at the end."""
        device = next(iter(self.targets.values())).device if self._device is None else self._device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = _STREAM(device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _load(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None
    ) -> Staged:
        parts, whole, scales = self._by_kind(tensors, policy_version)
        if base_version is not None:
            return self._adapted(parts, whole, policy_version, base_version)
        staged = self._load_whole(whole, scales, policy_version)
        layers = {name.removesuffix(LORA_A) for name in parts if name.endswith(LORA_A)}
        values = {id(t): v for t, v in zip(staged.targets, staged.values, strict=True)}
        bases = {layer: values[id(self._layer_weight(layer, policy_version))] for layer in layers}
        adapted = self._merge(_Base(policy_version, bases), parts, policy_version)
        self._base = _Base(policy_version, bases) if bases else _Base(-1, {})
        values |= {id(t): v for t, v in zip(adapted.targets, adapted.values, strict=True)}
        return Staged(policy_version, staged.targets, [values[id(t)] for t in staged.targets])

    def _by_kind(
        self, tensors: Iterable[NamedTensor], policy_version: int
    ) -> tuple[dict[str, Tensor], list[NamedTensor], dict[str, Tensor]]:
        """Returns the parts of adapters, whole tensors, and scales by the names of their tensors."""
        parts: dict[str, Tensor] = {}
        whole: list[NamedTensor] = []
        scales: dict[str, Tensor] = {}
        for tensor in tensors:
            if tensor.name.endswith((LORA_A, LORA_B)):
                parts[tensor.name] = _bytes_tensor(tensor, policy_version)
            elif tensor.name.endswith(SCALE) and tensor.name not in self.targets:
                scales[tensor.name.removesuffix(SCALE)] = _bytes_tensor(tensor, policy_version)
            else:
                whole.append(tensor)
        return parts, whole, scales

    def _adapted(
        self,
        parts: Mapping[str, Tensor],
        whole: list[NamedTensor],
        policy_version: int,
        base_version: int,
    ) -> Staged:
        if whole:
            reason = (
                f"{whole[0].name!r} is not an adapter, but the update has base version {base_version}"
            )
            raise WeightMismatchError(policy_version, reason)
        if base_version != self._base.policy_version:
            reason = f"its adapters add to version {base_version}, held is {self._base.policy_version}"
            raise WeightMismatchError(policy_version, reason)
        return self._merge(self._base, parts, policy_version)

    def _merge(self, base: _Base, parts: Mapping[str, Tensor], policy_version: int) -> Staged:
        """W + B A of each layer with adapters."""
        expected = {f"{layer}{end}" for layer in base.weights for end in (LORA_A, LORA_B)}
        if different := sorted(expected ^ parts.keys()):
            raise WeightMismatchError(policy_version, f"adapter {different[0]!r} is missing or unknown")
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for layer, weight in base.weights.items():
            down, up = parts[layer + LORA_A], parts[layer + LORA_B]
            if (up.shape[0], down.shape[1]) != tuple(weight.shape) or up.shape[1] != down.shape[0]:
                reason = f"adapters of {layer!r} have shapes {tuple(up.shape)} and {tuple(down.shape)}"
                raise WeightMismatchError(policy_version, reason)
            product = up.to(weight.device, torch.float32) @ down.to(weight.device, torch.float32)
            targets.append(self._layer_weight(layer, policy_version))
            values.append((weight.float() + product).to(weight.dtype))
        return Staged(policy_version, targets, values)

    def _layer_weight(self, layer: str, policy_version: int) -> Tensor:
        target = self.targets.get(f"{layer}.weight")
        if target is None:
            raise WeightMismatchError(policy_version, f"the model has no layer {layer!r} for adapters")
        return target

    def _load_whole(
        self, tensors: list[NamedTensor], scales: Mapping[str, Tensor], policy_version: int
    ) -> Staged:
        if extra := sorted(scales.keys() - {tensor.name for tensor in tensors}):
            raise WeightMismatchError(policy_version, f"{extra[0] + SCALE!r} scales no tensor")
        values: dict[int, Tensor] = {}
        targets: dict[int, Tensor] = {}
        for tensor in tensors:
            target = self.targets.get(tensor.name)
            if target is None:
                raise WeightMismatchError(policy_version, f"the model has no tensor {tensor.name!r}")
            value = _read(tensor, scales.get(tensor.name), target, policy_version, self._device)
            earlier = values.get(id(target))
            if earlier is not None and not _same_bits(earlier, value):
                raise WeightMismatchError(
                    policy_version, f"{tensor.name!r} differs from a tensor to which it is tied"
                )
            values[id(target)], targets[id(target)] = value, target
        missing = sorted(name for name, target in self.targets.items() if id(target) not in values)
        if missing:
            shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise WeightMismatchError(policy_version, f"{len(missing)} tensors are missing: {shown}")
        return Staged(policy_version, list(targets.values()), list(values.values()))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares bits: NaN equals no number, not even itself."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _read(
    tensor: NamedTensor,
    scales: Tensor | None,
    target: Tensor,
    policy_version: int,
    device: torch.device | None,
) -> Tensor:
    """The tensor's bytes as a new tensor with the type and memory order of the target."""
    if tuple(tensor.shape) != tuple(target.shape):
        reason = (
            f"{tensor.name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(target.shape)}"
        )
        raise WeightMismatchError(policy_version, reason)
    given = _bytes_tensor(tensor, policy_version)
    if scales is not None:
        given = _scaled(tensor, given, scales, policy_version)
    on_host = (target.device if device is None else device).type == "cpu"
    if on_host and given.dtype == target.dtype and target.is_contiguous():
        return given
    value = torch.empty_like(target, requires_grad=False, device=device)
    value.copy_(given)
    return value


def _scaled(tensor: NamedTensor, values: Tensor, scales: Tensor, policy_version: int) -> Tensor:
    """A matrix [R, C] float32 from its numbers and the scales of their blocks; exact."""
    if tuple(scales.shape) != scale_shape(tuple(tensor.shape)) or values.dim() != 2:
        reason = f"{tensor.name!r} of shape {tuple(tensor.shape)} has scales {tuple(scales.shape)}"
        raise WeightMismatchError(policy_version, reason)
    matrix = values.float()
    for at, row_scales in enumerate(scales.float()):
        spread = row_scales.repeat_interleave(BLOCK)[: matrix.shape[1]]
        matrix[at * BLOCK : (at + 1) * BLOCK] *= spread
    return matrix


def _bytes_tensor(tensor: NamedTensor, policy_version: int) -> Tensor:
    """A copy of the tensor's bytes as a tensor of its own type on the host."""
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightMismatchError(policy_version, f"{tensor.name!r} has unknown dtype {tensor.dtype!r}")
    value = torch.empty(tuple(tensor.shape), dtype=dtype)
    if tensor.data.nbytes != value.nbytes:
        raise WeightMismatchError(policy_version, f"{tensor.name!r} has {tensor.data.nbytes} bytes")
    # NumPy copies without the interpreter's lock and in this thread alone, while the engine computes.
    host_bytes(value)[:] = np.frombuffer(tensor.data, np.uint8)
    return value


def host_bytes(value: Tensor) -> UInt8Array:
    """View [n] of the bytes of a contiguous tensor on the host."""
    return value.view(-1).view(torch.uint8).numpy()
