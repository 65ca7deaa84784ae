"""Device memory of tensors, given back and taken again while the tensors stay as they are.

Storages are emptied, not tensors: views, tied weights and shards stay what they are.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Offload:
    """Storages that are empty now, with their contents on the host."""

    def __init__(self) -> None:
        self._emptied: list[tuple[Any, int, Tensor | None]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are free on the device now."""
        return sum(num_bytes for _, num_bytes, _ in self._emptied)

    @torch.no_grad()
    def free(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        """Empties the tensors' storages. With `keep` their contents are kept on the host."""
        is_cuda = False
        for storage in _storages(tensors):
            num_bytes = storage.nbytes()
            is_cuda |= storage.device.type == "cuda"
            host = None
            if keep:
                host = torch.empty(
                    num_bytes, dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
                )
                host.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._emptied.append((storage, num_bytes, host))
        if is_cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the storages their memory and contents again; zeros where these were not kept."""
        emptied, self._emptied = self._emptied, []
        for storage, num_bytes, host in emptied:
            storage.resize_(num_bytes)
            if host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(host)


def _storages(tensors: Iterable[Tensor]) -> list[Any]:
    """Each storage once; those that cannot be emptied (mapped files, shared memory) are left out."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        own: Any = getattr(tensor, "_local_tensor", tensor)  # the shard of a distributed tensor
        storage = own.untyped_storage()
        if storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
