"""Verified bytes of a fetched version, until the engine has taken them."""

from collections.abc import Iterator
from pathlib import Path

from tailrace.weights.files import read_version
from tailrace.weights.tensors import TensorBytes, views
from tailrace_protos.weights import WeightManifest


class StagedWeights:
    """Verified bytes of a version. Its tensors are views, readable as long as they are referenced."""

    def __init__(self, manifest: WeightManifest, buffer: memoryview, num_fetched: int) -> None:
        self.manifest = manifest
        self.num_fetched = num_fetched  # bytes that came over the network
        self._buffer: memoryview | None = buffer

    @property
    def buffer(self) -> memoryview:
        """All bytes of the version."""
        assert self._buffer is not None, "closed"
        return self._buffer

    def tensors(self) -> Iterator[TensorBytes]:
        """Tensors in the order of the manifest."""
        return views(self.manifest, self.buffer)

    def close(self) -> None:
        """Releases the bytes; the memory is freed with the last view."""
        self._buffer = None


class FileWeights(StagedWeights):
    """A version in a safetensors file."""

    def __init__(self, manifest: WeightManifest, path: Path) -> None:
        """Maps and verifies the file; raises `OSError`, `ManifestError` or `ChecksumError`."""
        found = read_version(path, manifest)
        super().__init__(manifest, memoryview(b""), 0)
        self._found: list[TensorBytes] = found

    def tensors(self) -> Iterator[TensorBytes]:
        """Tensors in the order of the manifest."""
        return iter(self._found)

    def close(self) -> None:
        """Releases the mapping."""
        self._found = []
