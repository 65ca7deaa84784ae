"""Weights in the types that servers declare: as weight_sync makes them, and as torch rounds them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from tailrace.weights import TensorBytes
from tailrace.weights.target_types import BLOCK, convert, planned
from tailrace.weights.tensors import fill, layout, views
from tailrace_protos.weights import WeightManifest


def in_type(tensors: Sequence[TensorBytes], target: str) -> list[TensorBytes]:
    """Tensors that a server with this type gets."""
    offsets, num_bytes = layout(tensors)
    buffer = memoryview(bytearray(num_bytes))
    manifest = WeightManifest(0, "a", 0, None, fill(buffer, tensors, offsets), num_bytes)
    plan = planned(manifest, target)
    assert plan is not None
    made = memoryview(bytearray(plan.num_bytes))
    return list(views(convert(manifest, buffer, plan, made), made))


def rounded(model: Any, target: str) -> Any:
    """A copy of a decoder with its weights rounded to this type."""
    found = copy.deepcopy(model)
    for name, parameter in found.named_parameters():
        is_linear = parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        if target == "float8_e4m3fn" and is_linear:
            for rows in parameter.data.split(BLOCK):
                for block in rows.split(BLOCK, dim=1):
                    scale = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
                    block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
        else:
            parameter.data.copy_(parameter.data.to(torch.bfloat16))
    return found
