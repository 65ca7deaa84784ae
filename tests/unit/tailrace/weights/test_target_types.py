"""Conversions are those of torch, bit for bit; blocks have the least scales, and widen exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailrace.weights import TensorBytes
from tailrace.weights.deltas import encode_delta, same_layout
from tailrace.weights.target_types import BLOCK, SCALE, convert, planned
from tailrace.weights.tensors import fill, layout, verify, views
from tailrace_protos.weights import WeightManifest

NAME = "model.layers.0.mlp.up_proj.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def published(**tensors: torch.Tensor) -> tuple[WeightManifest, memoryview]:
    """A version of these tensors; `__` in a name stands for a dot."""
    made = [
        TensorBytes(
            name.replace("__", "."),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1)),
        )
        for name, tensor in tensors.items()
    ]
    offsets, num_bytes = layout(made)
    buffer = memoryview(bytearray(num_bytes))
    return WeightManifest(1, "a", 1, None, fill(buffer, made, offsets), num_bytes), buffer


def converted(version: tuple[WeightManifest, memoryview], target: str) -> dict[str, torch.Tensor]:
    return tensors_of(*converted_bytes(version, target))


def converted_bytes(
    version: tuple[WeightManifest, memoryview], target: str
) -> tuple[WeightManifest, memoryview]:
    plan = planned(version[0], target)
    assert plan is not None
    buffer = memoryview(bytearray(plan.num_bytes))
    made = convert(*version, plan, buffer)
    verify(made, buffer)
    assert made.target == target
    return made, buffer


def tensors_of(manifest: WeightManifest, buffer: memoryview) -> dict[str, torch.Tensor]:
    found = {}
    for each in views(manifest, buffer):
        flat = torch.frombuffer(bytearray(each.data), dtype=getattr(torch, each.dtype))
        found[each.name] = flat.view(each.shape)
    return found


def widened(tensors: dict[str, torch.Tensor], name: str = NAME) -> torch.Tensor:
    """A matrix from its float8 numbers and scales, by torch alone."""
    matrix, scales = tensors[name].float(), tensors[name + SCALE]
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return matrix * spread[: matrix.shape[0], : matrix.shape[1]]


def every_kind_of_number() -> torch.Tensor:
    """Float32 numbers at, beside and between the float8 and bfloat16 ones, and random bits."""
    eighth = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    eighth = eighth[eighth.isfinite()]
    between = (eighth[:-1] + eighth[1:]) / 2
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64).astype(np.uint32)
    found = torch.cat([eighth, between, torch.from_numpy(bits.view(np.float32))])
    beside = torch.tensor([float("inf"), -float("inf")])
    return torch.cat([found, torch.nextafter(found, beside[0]), torch.nextafter(found, beside[1])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bfloat16_is_that_of_torch(dtype: torch.dtype) -> None:
    given = every_kind_of_number().to(dtype)
    plain = published(norm__weight=given)
    if dtype is torch.bfloat16:
        assert planned(plain[0], "bfloat16") is None, "nothing to convert"
        return
    found, expected = converted(plain, "bfloat16")["norm.weight"], given.to(torch.bfloat16)
    number = ~expected.isnan()
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
    assert torch.equal(found.isnan(), expected.isnan())


def test_float8_numbers_are_those_of_torch() -> None:
    given = every_kind_of_number()
    given = given[given.isfinite() & (given.abs() <= 448)]
    given[0] = 448.0  # in each row of one block: the scale is 1
    rows = given[: len(given) // BLOCK * BLOCK].view(-1, BLOCK).clone()
    rows[:, 0] = 448.0
    found = converted(published(**{NAME.replace(".", "__"): rows}), "float8_e4m3fn")
    assert torch.equal(found[NAME + SCALE], torch.ones(-(-len(rows) // BLOCK), 1))
    expected = rows.to(torch.float8_e4m3fn)
    assert torch.equal(found[NAME].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1), (5, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_blocks_have_the_least_power_of_two_and_widen_exactly(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    given = (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(dtype)
    found = converted(published(**{NAME.replace(".", "__"): given}), "float8_e4m3fn")
    scales = found[NAME + SCALE]
    for row, column in np.ndindex(*scales.shape):
        block = given.float()[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        scale, most = float(scales[row, column]), float(block.abs().max())
        assert np.log2(scale) % 1 == 0
        assert scale * 448 / 2 < most <= scale * 448
    wide = widened(found)
    assert torch.equal(wide.to(torch.bfloat16).float(), wide), "also exact in bfloat16"
    assert ((wide - given.float()).abs() <= given.float().abs() / 16 + scales.max() * 2**-10).all()


def test_zeros_and_numbers_that_are_not_finite() -> None:
    given = torch.zeros(130, 4)
    given[129] = torch.tensor([float("inf"), float("nan"), -2.0, 448.0])
    found = converted(published(**{NAME.replace(".", "__"): given}), "float8_e4m3fn")
    wide = widened(found)
    assert not wide[:129].any()
    assert wide[129].isnan().tolist() == [True, True, False, False]
    assert wide[129, 2:].tolist() == [-2.0, 448.0]


def test_only_matrices_of_linear_layers_become_float8() -> None:
    tensors = {
        "model__embed_tokens__weight": torch.randn(8, 4),
        NAME.replace(".", "__"): torch.randn(8, 4),
        "model__layers__0__mlp__gate__weight": torch.randn(8, 4),
        "model__layers__0__mlp__experts__up_proj": torch.randn(2, 8, 4),
        "model__norm__weight": torch.randn(4),
        "model__layers__0__mlp__up_proj__lora_A__weight": torch.randn(2, 4),
        "steps": torch.arange(3),
        "lm_head__weight": torch.randn(8, 4),
    }
    found = converted(published(**tensors), "float8_e4m3fn")
    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {
        "model.embed_tokens.weight": "torch.bfloat16",
        NAME: "torch.float8_e4m3fn",
        NAME + SCALE: "torch.float32",
        "model.layers.0.mlp.gate.weight": "torch.bfloat16",
        "model.layers.0.mlp.experts.up_proj": "torch.bfloat16",
        "model.norm.weight": "torch.bfloat16",
        "model.layers.0.mlp.up_proj.lora_A.weight": "torch.float32",
        "steps": "torch.int64",
        "lm_head.weight": "torch.bfloat16",
    }
    assert torch.equal(found["steps"], tensors["steps"])


def test_adapters_are_never_converted() -> None:
    manifest, _ = published(a__lora_A__weight=torch.randn(2, 4))
    adapters = WeightManifest(2, "a", 2, 1, manifest.tensors, manifest.num_bytes)
    assert planned(adapters, "float8_e4m3fn") is None


@pytest.mark.parametrize(("target", "most"), [("bfloat16", 0.03), ("float8_e4m3fn", 0.03)])
def test_small_steps_make_small_differences_in_the_declared_type(target: str, most: float) -> None:
    """As those of an optimizer at a learning rate of 1e-6; all float32 numbers change."""
    torch.manual_seed(0)
    before = 0.02 * torch.randn(512, 512)
    after = before + 1e-6 * torch.sign(torch.randn(512, 512))
    name = NAME.replace(".", "__")
    old, new = (converted_bytes(published(**{name: each}), target) for each in (before, after))
    assert same_layout(old[0], new[0])
    delta, _ = encode_delta(old[0], new[0], old[1], new[1])
    assert delta.num_bytes < most * new[0].num_bytes
