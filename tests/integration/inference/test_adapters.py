"""Adapters on their way: a server that comes late takes the base first, then what adds to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tailrace.weights import WeightsNotTakenError
from tailrace.weights.tensors import TensorBytes
from tailrace_inference.__main__ import build
from tests.integration.inference.test_server import FAST
from tests.integration.inference.world import (
    SERVER_ID,
    World,
    address_of,
    make_model,
    own_logprobs,
    weights_of,
)

LAYER = "model.layers.0.self_attn.q_proj"


def adapters(model: Any, seed: int) -> tuple[list[TensorBytes], torch.Tensor]:
    """Random A and B of one layer, and their product."""
    out, inner = dict(model.named_parameters())[f"{LAYER}.weight"].shape
    rng = np.random.default_rng(seed)
    down = rng.normal(0, 0.5, (2, inner)).astype(np.float32)
    up = rng.normal(0, 0.5, (out, 2)).astype(np.float32)
    tensors = [
        TensorBytes(f"{LAYER}.{part}.weight", "float32", array.shape, memoryview(array).cast("B"))
        for part, array in (("lora_A", down), ("lora_B", up))
    ]
    return tensors, torch.from_numpy(up @ down)


@pytest.mark.parametrize("world", [FAST], indirect=True)
async def test_a_late_joiner_takes_the_base_and_the_adapters_of_the_newest_version(
    world: World,
) -> None:
    model = make_model(1)
    await world.put_card()
    first, _ = adapters(model, 0)
    publish = world.publisher.publish
    base = await publish([*weights_of(model), *first], lineage="test", optimizer_step=0)
    for step in (1, 2, 3):  # more than weight_sync keeps of whole versions
        changed, product = adapters(model, step)
        version = await publish(changed, lineage="test", optimizer_step=step, base_version=base)
    world.services.serve("inference", build, SERVER_ID)
    status = await world.serving(version)
    dict(model.named_parameters())[f"{LAYER}.weight"].data.add_(product)
    asked = world.request("one", [5, 6, 7], 12)
    generation = await world.generate(address_of(status), asked)
    expected = own_logprobs(model, [5, 6, 7, *generation.token_ids.tolist()], 12)
    assert generation.inference_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    assert [span.policy_version for span in generation.spans] == [version]


async def test_adapters_of_a_base_that_nobody_has_are_refused(world: World) -> None:
    changed, _ = adapters(make_model(1), 0)
    with pytest.raises(WeightsNotTakenError, match="no longer held"):
        await world.publisher.publish(changed, lineage="test", optimizer_step=1, base_version=7)
