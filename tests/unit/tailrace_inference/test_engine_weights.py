"""Weights that change under running calls: right versions, right numbers, or a clear refusal."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from tailrace.weights.tensors import TensorBytes
from tailrace_inference.engine.weights import WeightMismatchError, WeightStage
from tests.unit.tailrace_inference.harness import (
    Client,
    make_engine,
    make_model,
    own_logprobs,
    weights_of,
)
from tests.world.declared_types import in_type, rounded


@pytest.mark.parametrize("forward", ["auto", "generic"])
def test_each_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(
    forward: str,
) -> None:
    models = [make_model(seed=seed) for seed in range(3)]
    client = Client(
        make_engine(models[0], forward=forward, stream_interval_ms=1e6, max_batched_tokens=16)
    )
    asked = [client.ask([1 + index] * (3 + 9 * index), 40) for index in range(4)]
    for version in (1, 2):
        for _ in range(11):
            client.engine.step()
        client.engine.stage(weights_of(models[version]), version)
        client.engine.step()
        client.engine.apply()
    client.finish()
    for one in asked:
        generation = one.generation
        by_version = [own_logprobs(model, one.ids)[len(one.prompt) - 1 :] for model in models]
        versions = np.repeat(
            [span.policy_version for span in generation.spans],
            [span.num_tokens for span in generation.spans],
        )
        expected = np.choose(versions, by_version)
        assert np.abs(generation.inference_logprobs - expected).max() < 1e-4
        assert set(versions.tolist()) == {0, 1, 2}
    stats = client.engine.stats()
    assert stats.num_recomputed_tokens > 0
    assert stats.num_stale_kv_tokens == 0


def test_a_prefix_of_an_older_version_is_not_reused() -> None:
    client = Client(make_engine(make_model()))
    client.one([5, 6, 7, 8], 3, episode="e")
    client.engine.stage(weights_of(make_model(seed=1)), 1)
    client.engine.apply()
    assert client.one([5, 6, 7, 8], 3, episode="e").generation.num_cached_tokens == 0


def test_keeping_the_cache_is_an_option_whose_tokens_are_counted() -> None:
    old, new = make_model(), make_model(seed=1)
    client = Client(make_engine(old, kv_on_update="keep"))
    running = client.ask([1, 2, 3], 20)
    client.one([5, 6, 7, 8], 3, episode="e")
    assert not running.ended or running.generation.num_tokens == 20
    again = client.ask([9, 8, 7], 20)
    for _ in range(5):
        client.engine.step()
    client.engine.stage(weights_of(new), 1)
    client.engine.apply()
    client.finish()
    reused = client.one([5, 6, 7, 8], 3, episode="e")
    assert reused.generation.num_cached_tokens == 3
    stats = client.engine.stats()
    assert stats.num_recomputed_tokens == 0
    assert stats.num_stale_kv_tokens == 15 + 3
    exact = own_logprobs(new, again.ids)[2:]
    assert np.abs(exact - again.generation.inference_logprobs)[5:].max() > 1e-3, (
        "it is an approximation"
    )


def test_staging_changes_nothing_until_it_is_applied() -> None:
    old = make_model()
    client = Client(make_engine(old))
    client.engine.stage(weights_of(make_model(seed=1)), 1)
    asked = client.one([1, 2, 3], 10)
    assert [span.policy_version for span in asked.generation.spans] == [0]
    exact = own_logprobs(old, asked.ids)[2:]
    assert np.abs(asked.generation.inference_logprobs - exact).max() < 1e-4


def test_missing_extra_misshapen_and_torn_tensors_are_named_and_the_old_version_stays() -> None:
    model = make_model()
    client = Client(make_engine(model))
    good = weights_of(make_model(seed=1))
    name = good[3].name
    broken = {
        f"missing: {name}": [*good[:3], *good[4:]],
        "no tensor 'model.extra'": [*good, good[0]._replace(name="model.extra")],
        "has shape (1,)": [*good[:3], good[3]._replace(shape=(1,)), *good[4:]],
        "bytes": [*good[:3], good[3]._replace(data=good[3].data[:-4]), *good[4:]],
        "unknown dtype 'float31'": [*good[:3], good[3]._replace(dtype="float31"), *good[4:]],
    }
    for reason, tensors in broken.items():
        with pytest.raises(WeightMismatchError) as refused:
            client.engine.stage(iter(tensors), 7)
        assert reason in str(refused.value)
        assert refused.value.policy_version == 7
    asked = client.one([1, 2, 3], 5)
    assert [span.policy_version for span in asked.generation.spans] == [0]
    assert np.abs(asked.generation.inference_logprobs - own_logprobs(model, asked.ids)[2:]).max() < 1e-4


def test_tied_embeddings_may_come_under_both_names_but_must_agree() -> None:
    new = make_model(seed=1)
    tensors = weights_of(new)
    embedding = next(tensor for tensor in tensors if "embed_tokens" in tensor.name)
    client = Client(make_engine(make_model()))
    client.engine.stage([*tensors, embedding._replace(name="lm_head.weight")], 1)
    client.engine.apply()
    asked = client.one([1, 2, 3], 5)
    assert np.abs(asked.generation.inference_logprobs - own_logprobs(new, asked.ids)[2:]).max() < 1e-4
    other = memoryview(np.zeros(embedding.shape, np.float32)).cast("B")
    with pytest.raises(WeightMismatchError, match="tied"):
        client.engine.stage([*tensors, embedding._replace(name="lm_head.weight", data=other)], 2)


def test_a_tied_tensor_under_both_names_may_hold_nan() -> None:
    model = make_model("qwen3")
    model.lm_head.weight.data[3, 5] = torch.nan
    tied = memoryview(model.lm_head.weight.detach().numpy()).cast("B")
    both = [*weights_of(model), TensorBytes("lm_head.weight", "float32", (67, 32), tied)]
    staged = WeightStage(make_model("qwen3")).load(both, 1)
    assert sum(int(value.isnan().sum()) for value in staged.values) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_updates_of_narrow_types_are_widened_exactly(dtype: torch.dtype) -> None:
    rough = make_model(seed=1)
    tensors = []
    for tensor, parameter in zip(weights_of(rough), rough.parameters(), strict=True):
        narrow = parameter.data.to(dtype)
        parameter.data.copy_(narrow)
        data = memoryview(narrow.view(torch.uint8).numpy()).cast("B")
        tensors.append(tensor._replace(dtype=str(dtype).removeprefix("torch."), data=data))
    client = Client(make_engine(make_model()))
    client.engine.stage(tensors, 1)
    client.engine.apply()
    staged = WeightStage(make_model()).load(tensors, 1)
    assert all(map(torch.equal, staged.values, rough.parameters()))
    asked = client.one([1, 2, 3], 5)
    exact = own_logprobs(rough, asked.ids)[2:]
    assert np.abs(asked.generation.inference_logprobs - exact).max() < 1e-4


def test_float8_blocks_are_widened_by_their_scales_exactly() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 300, bias=False)
    given = nn.ModuleDict({"up_proj": layer})
    exact = rounded(given, "float8_e4m3fn")
    tensors = in_type(weights_of(given), "float8_e4m3fn")
    assert [tensor.dtype for tensor in tensors] == ["float8_e4m3fn", "float32"]
    for dtype in (torch.float32, torch.bfloat16):
        staged = WeightStage(copy.deepcopy(given).to(dtype)).load(tensors, 1)
        assert torch.equal(staged.values[0].float(), exact["up_proj"].weight)


def test_scales_that_do_not_fit_are_named() -> None:
    given = nn.ModuleDict({"up_proj": nn.Linear(200, 300, bias=False)})
    matrix, scales = in_type(weights_of(given), "float8_e4m3fn")
    short = scales._replace(shape=(3, 1), data=scales.data[:12])
    with pytest.raises(WeightMismatchError, match=r"up_proj.weight' of shape \(300, 200\) has scales"):
        WeightStage(given).load([matrix, short], 1)
    with pytest.raises(WeightMismatchError, match=r"'other\.weight_scale_inv' scales no"):
        WeightStage(given).load([matrix, scales, scales._replace(name="other.weight_scale_inv")], 1)


def test_broken_weights_are_reported_honestly_and_poison_nothing_after_them() -> None:
    good, broken = make_model(), make_model()
    next(broken.parameters()).data.fill_(float("nan"))
    client = Client(make_engine(good, kv_cache_tokens=256, max_running=4))
    client.engine.stage(weights_of(broken), 1)
    client.engine.apply()
    running = client.ask([1, 2, 3], 30)
    sick = client.one([4, 5, 6, 7], 10, episode="e")
    assert np.isnan(sick.generation.inference_logprobs).all()
    assert client.engine.stats().num_nonfinite_logprobs >= 10
    again = client.ask([9] * 20, 30)
    for _ in range(4):
        client.engine.step()
    client.engine.stage(weights_of(good), 2)
    client.engine.apply()
    client.finish()
    healthy = client.one([4, 5, 6, 7], 10, episode="e")
    assert running.ended
    for one, num_sick in ((again, 4), (healthy, 0)):
        exact = own_logprobs(good, one.ids)[len(one.prompt) - 1 :]
        assert np.abs(one.generation.inference_logprobs - exact)[num_sick:].max() < 1e-4


LAYER = "model.layers.0.self_attn.q_proj"


def adapters(seed: int, out: int, inner: int) -> list[TensorBytes]:
    """Random A and B of one layer."""
    rng = np.random.default_rng(seed)
    down, up = rng.normal(0, 0.3, (2, inner)), rng.normal(0, 0.3, (out, 2))
    return [
        TensorBytes(
            f"{LAYER}.{part}.weight",
            "float32",
            array.shape,
            memoryview(array.astype(np.float32)).cast("B"),
        )
        for part, array in (("lora_A", down), ("lora_B", up))
    ]


def test_adapters_alone_add_to_the_weights_that_came_before_not_to_each_other() -> None:
    model, expected = make_model(seed=1), make_model(seed=1)
    weight = dict(expected.named_parameters())[f"{LAYER}.weight"]
    shape = tuple(weight.shape)
    client = Client(make_engine(make_model()))
    client.engine.stage([*weights_of(model), *adapters(0, *shape)], 1)
    client.engine.apply()
    assert client.engine.base_version == 1
    for version in (2, 3):
        client.engine.stage(adapters(version, *shape), version, base_version=1)
        client.engine.apply()
    down, up = (
        torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape)
        for part in adapters(3, *shape)
    )
    weight.data.add_(up @ down)
    asked = client.one([1, 2, 3], 5)
    exact = own_logprobs(expected, asked.ids)[2:]
    assert np.abs(asked.generation.inference_logprobs - exact).max() < 1e-4
    assert [span.policy_version for span in asked.generation.spans] == [3]


def test_adapters_for_weights_that_are_not_there_are_refused() -> None:
    model = make_model()
    shape = tuple(dict(model.named_parameters())[f"{LAYER}.weight"].shape)
    client = Client(make_engine(model))
    first = adapters(0, *shape)
    with pytest.raises(WeightMismatchError, match="add to version 0, held is -1"):
        client.engine.stage(first, 1, base_version=0)
    client.engine.stage([*weights_of(model), *first], 1)
    client.engine.apply()
    stray = first[0]._replace(name="model.extra.lora_A.weight")
    bad = {
        "is missing or unknown": [first[0]],
        "is not an adapter": [*first, weights_of(model)[0]],
        "missing or unknown": [*first, stray],
        "have shapes": [first[0], first[0]._replace(name=first[1].name)],
    }
    for reason, tensors in bad.items():
        with pytest.raises(WeightMismatchError, match=reason):
            client.engine.stage(tensors, 2, base_version=1)
    with pytest.raises(WeightMismatchError, match=r"no layer 'model\.extra'"):
        client.engine.stage([*weights_of(model), stray], 2)


def test_the_first_call_answers_soon_after_an_update_and_the_others_follow() -> None:
    """Long contexts are not all computed again before anyone gets a token."""
    client = Client(make_engine(make_model(), max_batched_tokens=2048, stream_chunk_tokens=1))
    asked = [client.ask([7] * (200 - 20 * index), 30) for index in range(8)]
    engine = client.engine
    while not all(one.ledger.num_tokens for one in asked):
        engine.step()
    newer = make_model(seed=1)
    engine.stage(weights_of(newer), 1)
    engine.apply()
    before, computed = [one.ledger.num_tokens for one in asked], engine.stats().num_computed_tokens
    engine.step()
    gained = [one.ledger.num_tokens - had for one, had in zip(asked, before, strict=True)]
    assert gained == [0] * 7 + [1]
    assert engine.stats().num_computed_tokens - computed <= 128 + 8
    client.finish()
    for one in asked:
        wanted = own_logprobs(newer, one.ids)[-5:]
        np.testing.assert_allclose(one.generation.inference_logprobs[-5:], wanted, atol=1e-4)


def test_all_versions_are_staged_on_one_stream_whose_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device.type)

        def synchronize(self) -> None:
            made.append("synchronized")

    monkeypatch.setattr("tailrace_inference.engine.weights._STREAM", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    stage = WeightStage(nn.Linear(2, 2), torch.device("cuda"))
    for _ in range(3):
        with stage._beside_steps():
            made.append("copied")
    assert made == ["cuda", *["copied", "synchronized"] * 3]


def test_adapters_of_a_base_that_whole_weights_have_replaced_are_refused() -> None:
    model = make_model()
    stage = WeightStage(model)
    down, up = np.ones((2, 32), np.float32), np.ones((64, 2), np.float32)
    parts = [
        TensorBytes(
            f"model.layers.0.self_attn.q_proj.{name}.weight", "float32", array.shape, array.data
        )
        for name, array in (("lora_A", down), ("lora_B", up))
    ]
    stage.load([*weights_of(model), *parts], 0)
    assert stage.base_version == 0
    stage.load(weights_of(make_model(seed=1)), 1)
    assert stage.base_version == -1
    with pytest.raises(WeightMismatchError, match="add to version 0, held is -1"):
        stage.load(parts, 2, base_version=0)
