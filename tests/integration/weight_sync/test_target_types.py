"""Servers that declare a type get each version in it, by every way, with the bytes that torch gives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tailrace.bus import Bus
from tailrace.weights import (
    ChecksumError,
    StagedWeights,
    TensorBytes,
    WeightPublisher,
    WeightReceiver,
)
from tailrace.weights.errors import TargetTypeError, WeightsError
from tailrace.weights.target_types import BLOCK, SCALE
from tailrace_inference.ports import NamedTensor
from tailrace_protos.weights import WeightsApplied
from tests.integration.weight_sync.conftest import HOST_ID, WeightSyncProcess
from tests.integration.weight_sync.test_weight_sync import damage, newest, newest_with, publisher

__all__ = ["publisher"]
LINEAR, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
LEARNER_RATE = 1e-6


def matrices(step: int) -> dict[str, torch.Tensor]:
    """Float32 weights; each step changes all of them a little."""
    torch.manual_seed(0)
    made = {EMBEDDING: 0.02 * torch.randn(300, 200), LINEAR: 0.02 * torch.randn(500, 200)}
    for number in range(step):
        torch.manual_seed(number + 1)
        for tensor in made.values():
            tensor += LEARNER_RATE * torch.sign(torch.randn(tensor.shape))
    return made


def as_bytes(tensors: dict[str, torch.Tensor]) -> list[TensorBytes]:
    return [
        TensorBytes(name, "float32", tuple(tensor.shape), memoryview(tensor.numpy()).cast("B"))
        for name, tensor in tensors.items()
    ]


def tensor_of(found: NamedTensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(found.data), dtype=getattr(torch, found.dtype))
    return flat.view(found.shape)


def check(staged: StagedWeights, target: str, step: int) -> None:
    """The version has the values that torch gives, and float8 blocks widen to within half a step."""
    found = {each.name: tensor_of(each) for each in staged.tensors()}
    for name, given in matrices(step).items():
        if target == "float8_e4m3fn" and name == LINEAR:
            spread = found[name + SCALE].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            spread = spread[: given.shape[0], : given.shape[1]]
            expected = (given / spread).to(torch.float8_e4m3fn)
            assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))
        else:
            wanted = getattr(torch, "bfloat16" if target else "float32")
            assert torch.equal(found[name], given.to(wanted))


@pytest.mark.parametrize("host_id", [HOST_ID, "another-host"])
async def test_servers_of_all_types_get_each_version_and_only_differences_travel(
    publisher: WeightPublisher, bus: Bus, host_id: str
) -> None:
    targets = ("", "bfloat16", "float8_e4m3fn")
    servers = {
        target: WeightReceiver(bus, bus.run, host_id, f"s-{target}", target=target)
        for target in targets
    }
    for step in range(4):
        version = await publisher.publish(as_bytes(matrices(step)), lineage="a", optimizer_step=step)
        announced = await newest(servers[""])
        for target, server in servers.items():
            available = await server.in_own_type(announced)
            assert available.manifest.policy_version == version
            assert available.manifest.target == target
            staged = await server.fetch(available)
            check(staged, target, step)
            await server.report(WeightsApplied(f"s-{target}", version, 0.1, 0.1, 0.1))
            if host_id != HOST_ID and target and step >= 2:
                assert staged.num_fetched < 0.05 * available.manifest.num_bytes, "the differences"
    sizes = [(await newest(server)).manifest.num_bytes for server in servers.values()]
    assert sizes[0] > 1.9 * sizes[1] > 2.5 * sizes[2]
    for server in servers.values():
        await server.close()


async def test_servers_of_one_type_pass_it_on_among_themselves(
    publisher: WeightPublisher, bus: Bus
) -> None:
    servers = [
        WeightReceiver(
            bus, bus.run, f"host-{at}", f"s{at}", bind_host="127.0.0.2",
            target="bfloat16" if at < 4 else "",
        )
        for at in range(5)
    ]  # fmt: skip
    version = await publisher.publish(as_bytes(matrices(0)), lineage="a", optimizer_step=0)
    for server in servers[3:]:  # one of each type holds the version
        check(await server.fetch(await newest(server)), "bfloat16" if server is servers[3] else "", 0)
        name = f"s{servers.index(server)}"
        await server.report(WeightsApplied(name, version, 0.1, 0.1, 0.1))
    async with asyncio.timeout(60):
        while not servers[3].relay.num_sent_bytes:
            late = WeightReceiver(
                bus, bus.run, "host-3", "late", bind_host="127.0.0.2", target="bfloat16"
            )
            check(await late.fetch(await newest(late)), "bfloat16", 0)
            await late.close()
    available = await newest(servers[0])
    staged = await asyncio.gather(*(server.fetch(available) for server in servers[:3]))
    for each in staged:
        check(each, "bfloat16", 0)
    assert servers[4].relay.num_sent_bytes == 0, "it has other bytes"
    for server in servers:
        await server.close()


async def test_a_restarted_weight_sync_converts_again_and_leaves_no_memory(
    publisher: WeightPublisher, bus: Bus, weight_sync: WeightSyncProcess
) -> None:
    server = WeightReceiver(bus, bus.run, "another-host", "s0", target="float8_e4m3fn")
    version = await publisher.publish(as_bytes(matrices(1)), lineage="a", optimizer_step=1)
    check(await server.fetch(await newest(server)), "float8_e4m3fn", 1)
    weight_sync.kill()
    assert len(weight_sync.segments()) == 3, "of the learner, the published and the converted version"
    weight_sync.start()
    available = await newest_with(server, version)
    check(await server.fetch(available), "float8_e4m3fn", 1)
    for step in range(2, 5):  # older ones go with the versions that they come from
        await publisher.publish(as_bytes(matrices(step)), lineage="a", optimizer_step=step)
        check(await server.fetch(await newest(server)), "float8_e4m3fn", step)
    assert len(weight_sync.segments()) == 1 + 2 * 2
    await server.close()
    weight_sync.stop()
    assert len(weight_sync.segments()) == 1


async def test_versions_in_a_declared_type_are_files_of_their_own(
    publisher: WeightPublisher, bus: Bus, weight_sync: WeightSyncProcess, tmp_path: Path
) -> None:
    weight_sync.kill()
    weight_sync.configure(f", transport: files, volume: {tmp_path / 'volume'}")
    weight_sync.start()
    version = await publisher.publish(as_bytes(matrices(0)), lineage="a", optimizer_step=0)
    server = WeightReceiver(bus, bus.run, "another-host", "s0", target="float8_e4m3fn")
    available = await newest(server)
    path = tmp_path / "volume" / bus.run / "float8_e4m3fn" / str(version) / "model.safetensors"
    assert available.source.file == str(path)
    check(await server.fetch(available), "float8_e4m3fn", 0)
    assert server.relay.source is None, "nothing came over ZMQ"
    await server.close()


async def test_versions_that_have_the_type_already_are_not_copied_and_unknown_types_are_named(
    publisher: WeightPublisher, bus: Bus, weight_sync: WeightSyncProcess
) -> None:
    half = TensorBytes("w", "bfloat16", (10,), memoryview(bytes(20)))
    version = await publisher.publish([half], lineage="a", optimizer_step=0)
    server = WeightReceiver(bus, bus.run, HOST_ID, "s0", target="bfloat16")
    available = await newest(server)
    assert (available.manifest.policy_version, available.manifest.target) == (version, "")
    assert len(weight_sync.segments()) == 2
    wrong = WeightReceiver(bus, bus.run, HOST_ID, "s1", target="int3")
    with pytest.raises(TargetTypeError, match=r"int3.*none of bfloat16, float8_e4m3fn"):
        await wrong.in_own_type(available)


@pytest.mark.parametrize("damaged", ["converted", "published"])
async def test_damaged_bytes_are_neither_served_nor_converted_and_made_again(
    publisher: WeightPublisher, bus: Bus, weight_sync: WeightSyncProcess, damaged: str
) -> None:
    receiver = WeightReceiver(bus, bus.run, HOST_ID, "s0", target="bfloat16")
    plain = WeightReceiver(bus, bus.run, HOST_ID, "s1")
    await publisher.publish(as_bytes(matrices(0)), lineage="a", optimizer_step=0)
    announced = await newest(plain)
    if damaged == "published":
        damage(announced, at=17)  # noticed before the conversion
    else:
        damage(await newest(receiver), at=17)
        with pytest.raises(ChecksumError):
            await receiver.fetch(await newest(receiver))
        version = announced.manifest.policy_version
        await receiver.report(WeightsApplied("s0", version, 0.0, 0.0, 0.0, "wrong", damaged=True))
    async with asyncio.timeout(60):
        while True:
            try:
                staged = await receiver.fetch(await receiver.in_own_type(announced))
                break
            except WeightsError:
                await asyncio.sleep(0.01)
    check(staged, "bfloat16", 0)
    was_copied = "damaged weights copied again from the learner" in weight_sync.log
    assert was_copied == (damaged == "published")
    await receiver.close()
