"""Device memory of a worker, given back while inference servers have the device."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tailrace.offload import Offload

_OURS = "tailrace_learner."


class WorkerMemory:
    """Device memory of a worker's models, optimizers and copies of weights."""

    def __init__(self, worker: object, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._offload = Offload()

    def free(self) -> None:
        """Moves all tensors of the device to the host."""
        kind = self._device.type  # `cuda` is not equal to the `cuda:0` of its tensors
        found = (one for one in reachable_tensors(self._worker) if one.device.type == kind)
        self._offload.free(found, keep=True)

    def restore(self) -> None:
        """Moves them back."""
        self._offload.restore()


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """All tensors that the learner's own objects, modules and optimizers hold, and their gradients."""
    seen: set[int] = set()
    left: deque[Any] = deque([root])
    while left:
        one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
            if one.grad is not None:
                yield one.grad
        elif isinstance(one, torch.nn.Module):
            left.extend([*one.parameters(), *one.buffers()])
        elif isinstance(one, dict):
            left.extend([*one.keys(), *one.values()])
        elif isinstance(one, list | tuple | set | deque):
            left.extend(one)
        elif isinstance(one, torch.optim.Optimizer):
            left.append(one.state)
        elif type(one).__module__.startswith(_OURS):
            left.extend(_attributes(one))


def _attributes(one: object) -> Iterator[Any]:
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield getattr(one, name)
