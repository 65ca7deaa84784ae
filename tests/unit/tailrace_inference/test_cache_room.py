"""Blocks and kept prefixes: one owner each, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.cache_size import DeviceError, NoRoomError, Sizes, cache_tokens
from tailrace_inference.engine.driver import torch_engine
from tailrace_inference.engine.forward import load_model
from tailrace_inference.engine.kv_cache import BlockPool, KVCache, KVShape
from tailrace_inference.engine.prefix import Prefix, PrefixStore, common_length
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_inference.harness import (
    Client,
    config_json,
    make_engine,
    make_model,
    random_prompt,
)


def prefix(length: int, first_block: int) -> Prefix:
    return Prefix(np.arange(length, dtype=np.int32), np.arange(first_block, first_block + 2), 0)


@given(st.lists(st.integers(1, 9), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_pool_hands_every_block_out_once(counts: list[int]) -> None:
    pool = BlockPool(200)
    owned = [pool.take(count) for count in counts if count <= pool.num_free]
    handed = np.concatenate([np.empty(0, np.int64), *owned])
    assert len(set(handed.tolist())) == len(handed)
    assert 0 not in handed, "block 0 stays zero"
    for blocks in owned:
        pool.give(blocks)
    assert pool.num_free == 199


def test_the_pool_notices_blocks_given_back_twice() -> None:
    pool = BlockPool(5)
    blocks = pool.take(2)
    pool.give(blocks)
    with pytest.raises(AssertionError):
        pool.give(blocks)


def test_prefixes_leave_oldest_first_and_return_their_blocks() -> None:
    store = PrefixStore()
    for index in range(3):
        assert not len(store.keep(f"e{index}", prefix(5, 10 * index)))
    assert store.keep("e0", prefix(6, 50)).tolist() == [0, 1]
    assert store.evict().tolist() == [10, 11]
    assert store.take("e1") is None
    kept = store.take("e0")
    assert kept is not None
    assert kept.blocks.tolist() == [50, 51]
    assert store.clear().tolist() == [20, 21]
    assert (len(store), store.num_blocks) == (0, 0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_length_is_that_of_the_longest_shared_beginning(
    left: list[int], right: list[int]
) -> None:
    found = common_length(np.array(left, np.int32), np.array(right, np.int32))
    assert left[:found] == right[:found]
    assert found in (len(left), len(right)) or left[found] != right[found]


def test_layers_of_different_shapes_have_their_own_places_and_are_zeroed_together() -> None:
    shapes = [KVShape(2, 4, 4), KVShape(1, 4, 6), KVShape(2, 4, 4)]
    cache = KVCache(shapes, 5, 2, torch.device("cpu"), torch.float32)
    slots = torch.tensor([2, 3, 8])
    for layer, shape in enumerate(shapes):
        keys = torch.full((3, shape.num_heads, shape.key_dim), 1.0 + layer)
        values = torch.full((3, shape.num_heads, shape.value_dim), 10.0 + layer)
        cache.write(layer, slots, keys, values)
    for layer in range(3):
        assert set(cache.keys[layer][1].unique().tolist()) == {1.0 + layer}
        assert set(cache.values[layer][1].unique().tolist()) == {10.0 + layer}
    cache.zero(np.array([1]))
    for layer in range(3):
        assert not cache.keys[layer][1].any()
        assert not cache.values[layer][1].any()
        assert set(cache.keys[layer][4, 0].unique().tolist()) == {1.0 + layer}


def test_after_any_traffic_every_block_is_free_or_in_a_kept_prefix() -> None:
    client = Client(make_engine(make_model(), kv_cache_tokens=128, kv_block_tokens=4, max_running=6))
    rng = np.random.default_rng(5)
    for index in range(40):
        asked = client.ask(random_prompt(rng, 1, 30), int(rng.integers(1, 30)), episode=f"e{index % 9}")
        client.engine.step()
        if rng.random() < 0.2:
            client.engine.abort(asked.request.call_id)
    client.finish()
    stats = client.engine.stats()
    assert stats.used_tokens == 0
    assert 0 < stats.cached_tokens <= stats.capacity_tokens
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("settings_", "field"),
    [
        ({"max_batched_tokens": 10, "max_running": 11}, "max_batched_tokens"),
        ({"kv_cache_tokens": 64, "max_running": 8}, "kv_cache_tokens"),
        ({"transports": ()}, "transports"),
        ({"num_threads": 0}, "num_threads"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"drain_s": -1}, "drain_s"),
    ],
)
def test_impossible_configurations_name_their_key(settings_: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        InferenceConfig(**settings_)  # type: ignore[arg-type]


LAYERS = [KVShape(2, 8, 8), KVShape(2, 8, 8)]  # 64 values a token
SIZES = Sizes(weights=1000, element=2, hidden_size=4, vocab_size=10)


def room(utilization: float, total_bytes: int, free_bytes: int, sizes: Sizes = SIZES) -> int:
    config = InferenceConfig(
        gpu_memory_utilization=utilization, max_running=2, max_batched_tokens=2, kv_block_tokens=4
    )
    return cache_tokens(config, LAYERS, sizes, total_bytes, free_bytes)


def test_the_cache_gets_what_weights_and_activations_leave_of_the_share() -> None:
    activations = 2 * 10 * 16 + 2 * 4 * 12 * 2
    used = 2 * 1000 + activations
    total = 4 * (used + 128 * 100)
    assert room(0.25, total, total) == 100
    assert room(0.5, total, total) > 200
    assert room(0.25, total + 4 * 128 * 7, total) == 104, "whole blocks"
    assert room(0.25, total, 1000 + activations + 128 * 40) == 40, "never more than is free"
    assert room(0.0, total, total) == InferenceConfig().kv_cache_tokens


def test_the_base_of_adapters_is_a_third_set_of_weights() -> None:
    activations = 2 * 10 * 16 + 2 * 4 * 12 * 2
    merged = SIZES._replace(merges_adapters=True)
    total = 4 * (3 * 1000 + activations + 128 * 100)
    assert room(0.25, total, total, merged) == 100
    assert room(0.25, total, 2 * 1000 + activations + 128 * 40, merged) == 40
    assert room(0.25, total, total) > 100


@pytest.mark.parametrize("trains_adapters", [False, True])
def test_the_engine_counts_the_base_if_the_learner_trains_adapters(
    trains_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bool] = []

    def count(config: InferenceConfig, layers: object, sizes: Sizes, *_: int) -> int:
        counted.append(sizes.merges_adapters)
        return config.kv_cache_tokens

    monkeypatch.setattr("tailrace_inference.engine.forward.cache_tokens", count)
    torch_engine(ModelCard(config_json(), {}, trains_adapters), InferenceConfig(kv_cache_tokens=4096))
    assert set(counted) == {trains_adapters}


def test_the_first_weights_find_the_memory_that_was_free_before_cache_and_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are checked while both lie on the device, which has no room for a second cache."""
    counted: list[int] = []

    def count(config: InferenceConfig, layers: object, sizes: Sizes, total: int, free: int) -> int:
        counted.append(free)
        return config.kv_cache_tokens

    monkeypatch.setattr("tailrace_inference.engine.forward.cache_tokens", count)
    memory = "tailrace_inference.engine.forward._device_memory"
    monkeypatch.setattr(memory, lambda device: (900, 1000))
    model = load_model(config_json(), InferenceConfig(kv_cache_tokens=4096))
    monkeypatch.setattr(memory, lambda device: (10, 1000))
    num_counted = len(counted)
    model.recheck()
    assert len(counted) > num_counted
    assert set(counted) == {900}


def test_a_share_without_room_for_the_running_requests_says_what_to_change() -> None:
    with pytest.raises(NoRoomError, match="raise it or lower max_running") as raised:
        room(0.25, 4 * 2500, 10_000)
    assert raised.value.needed_bytes == 2 * 4 * 128


def test_a_share_of_gpu_memory_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="read on CUDA only"):
        InferenceConfig(gpu_memory_utilization=0.5, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="needs a CUDA device"):
            load_model(config_json(), InferenceConfig(gpu_memory_utilization=0.5))


def test_a_cache_that_no_memory_holds_says_what_to_change() -> None:
    with pytest.raises(DeviceError, match=r"lower inference\.kv_cache_tokens"):
        make_engine(make_model(), kv_cache_tokens=10**14)
