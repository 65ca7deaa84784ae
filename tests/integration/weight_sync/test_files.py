"""`transport: files`: versions on a volume, their number, a full disk, a damaged file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tailrace.bus import Bus
from tailrace.weights import TensorBytes, WeightPublisher, WeightReceiver
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess
from tests.integration.weight_sync.test_weight_sync import newest, newest_with, same, weights


@pytest.fixture
def volume(weight_sync: WeightSyncProcess, tmp_path: Path) -> Path:
    """weight_sync started again with this volume."""
    path = tmp_path / "volume"
    weight_sync.kill()
    weight_sync.configure(f", transport: files, volume: {path}")
    weight_sync.start()
    return path / weight_sync.run


@pytest.fixture
async def publisher(bus: Bus, run_name: str, volume: Path) -> AsyncIterator[WeightPublisher]:
    made = WeightPublisher(bus, run_name, HOST_ID)
    yield made
    await made.close()


def versions(volume: Path) -> list[int]:
    return sorted(int(folder.name) for folder in volume.iterdir())


async def test_servers_read_the_newest_versions_from_the_volume_and_older_ones_are_deleted(
    publisher: WeightPublisher, bus: Bus, volume: Path, weight_sync: WeightSyncProcess
) -> None:
    receiver = WeightReceiver(bus, bus.run, "another-host", "s0")
    kept = []
    for step in range(4):
        kept.append(await publisher.publish(weights(step), lineage="a", optimizer_step=step))
        staged = await receiver.fetch(await newest(receiver))
        assert same(staged, weights(step))
        assert staged.num_fetched == 0
        assert receiver.relay.source is None  # nothing came over ZMQ
    assert versions(volume) == kept[-2:]
    weight_sync.kill()
    weight_sync.start()
    assert same(await receiver.fetch(await newest_with(receiver, kept[-1])), weights(3))
    assert versions(volume) == kept[-2:]
    await receiver.close()


async def test_any_program_reads_the_files_with_their_types_bit_for_bit(
    publisher: WeightPublisher, volume: Path
) -> None:
    """Also bfloat16 and float8, which the learner may publish for engines of that type."""
    made = {
        "half": torch.randn(40, 30).to(torch.bfloat16),
        "eighth": torch.randn(40, 30).to(torch.float8_e4m3fn),
        "odd": torch.arange(7, dtype=torch.uint8),
        "whole": torch.randn(3),
    }
    tensors = [
        TensorBytes(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            memoryview(tensor.view(torch.uint8).numpy()).cast("B"),
        )
        for name, tensor in made.items()
    ]
    version = await publisher.publish(tensors, lineage="a", optimizer_step=7)
    path = volume / str(version) / "model.safetensors"
    read = load_file(path)
    assert {name: tensor.dtype for name, tensor in read.items()} == {
        name: tensor.dtype for name, tensor in made.items()
    }
    for name, tensor in made.items():
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata()["policy_version"] == str(version)
        assert file.metadata()["optimizer_step"] == "7"


async def test_without_room_on_the_volume_the_version_goes_over_zmq_and_the_log_names_the_remedy(
    publisher: WeightPublisher, bus: Bus, volume: Path, weight_sync: WeightSyncProcess
) -> None:
    volume.parent.mkdir()
    volume.write_text("a file where the folder should be")  # as permanent as a full disk
    version = await publisher.publish(weights(1), lineage="a", optimizer_step=1)
    receiver = WeightReceiver(bus, bus.run, "another-host", "s0")
    available = await newest(receiver)
    assert (available.manifest.policy_version, available.source.file) == (version, "")
    assert same(await receiver.fetch(available), weights(1))
    assert "lower weight_sync.keep_versions" in weight_sync.log
    assert str(volume) in weight_sync.log
    volume.unlink()
    await publisher.publish(weights(2), lineage="a", optimizer_step=2)
    assert (await newest(receiver)).source.file
    await receiver.close()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed", "nonsense"])
async def test_a_damaged_file_is_not_used(
    publisher: WeightPublisher, bus: Bus, volume: Path, damage: str
) -> None:
    version = await publisher.publish(weights(1), lineage="a", optimizer_step=1)
    path = volume / str(version) / "model.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[-1 if damage == "changed" else 10] ^= 255
        path.write_bytes(content)
    receiver = WeightReceiver(bus, bus.run, "another-host", "s0")
    staged = await receiver.fetch(await newest(receiver))
    assert same(staged, weights(1))
    assert staged.num_fetched == staged.manifest.num_bytes
    await receiver.close()


def test_files_without_a_volume_are_refused(weight_sync: WeightSyncProcess) -> None:
    weight_sync.kill()
    weight_sync.configure(", transport: files")
    weight_sync.start()
    assert weight_sync.ended(30) == 2
    assert "transport: files needs volume" in weight_sync.log.splitlines()[-1]
