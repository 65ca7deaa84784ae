"""The snapshot: one version in a file, whoever writes it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tailrace_protos.weights import WeightManifest
from tailrace_weight_sync.adapters.snapshot_file import SnapshotFile


def manifest(policy_version: int, num_bytes: int) -> WeightManifest:
    return WeightManifest(
        policy_version=policy_version,
        lineage="L",
        optimizer_step=policy_version,
        base_version=None,
        num_bytes=num_bytes,
        tensors=(),
    )


def test_a_version_saved_while_another_is_written_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop cancels the wait for a slow disk, not the thread that writes, and saves the newest."""
    snapshot = SnapshotFile(tmp_path / "run.weights")
    contents = {version: memoryview(bytes([version]) * 4096) for version in (1, 2)}
    second = threading.Thread(target=snapshot.save, args=(manifest(2, 4096), contents[2]))

    def slow(descriptor: int) -> None:
        if not second.ident:
            second.start()
            second.join(0.3)  # the other one has all the time it needs, if it does not wait

    monkeypatch.setattr(os, "fsync", slow)
    snapshot.save(manifest(1, 4096), contents[1])
    second.join()
    loaded = snapshot.load()
    assert loaded is not None
    assert (loaded[0].policy_version, bytes(loaded[1])) == (2, bytes(contents[2]))
