"""Ways of weights to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.weights import TensorBytes, WeightReceiver
from tailrace.weights.segment import SegmentFolder
from tailrace.weights.tensors import fill, layout
from tailrace_protos.weights import WeightManifest, WeightsAvailable, WeightSource


class FakeMember:
    """Notes the versions for which a place in a broadcast is asked; there is none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def receive(self, manifest: WeightManifest, source: WeightSource) -> None:
        self.asked.append(manifest.target)

    def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize(("target", "asked"), [("", [""]), ("bfloat16", [])])
async def test_versions_in_a_declared_type_are_not_broadcast(
    tmp_path: Path, target: str, asked: list[str]
) -> None:
    """Also the base of adapters, which are: its bytes at weight_sync are others."""
    array = np.arange(6, dtype=np.float32)
    tensors = [TensorBytes("w", "float32", array.shape, array.data)]
    offsets, num_bytes = layout(tensors)
    segment = SegmentFolder("run", "weight_sync", tmp_path).create(num_bytes)
    entries = fill(segment.data, tensors, offsets)
    manifest = WeightManifest(0, "a", 0, None, entries, num_bytes, target)
    bus: Any = None
    receiver = WeightReceiver(bus, "run", "host", "s0", shm_folder=tmp_path, target=target)
    member: Any = FakeMember()
    receiver.member = member
    source = WeightSource("host", segment.name, "")
    staged = await receiver.fetch(WeightsAvailable(manifest, source, broadcasts=True))
    assert [np.frombuffer(one.data, np.float32).tolist() for one in staged.tensors()] == [
        array.tolist()
    ]
    assert member.asked == asked
