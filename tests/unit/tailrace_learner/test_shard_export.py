"""Weights of a sharded learner leave it rank by rank, and no rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.shard_export import export_shards, rows_of
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config import LearnerConfig, LoraArgs
from tests.unit.tailrace_learner.factory import CPU, make_policy
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.test_checkpoints import CONFIG
from tests.unit.tailrace_learner.test_lora import worker as made_worker

PIECE_BYTES = 512
Exported = dict[str, tuple[str, tuple[int, ...], bytes]]


class NewMemory(TorchDispatchMode):
    """Counts bytes of tensors that are made, aside from memory that exists before."""

    def __init__(self, before: set[int]) -> None:
        super().__init__()
        self._before = before
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and not self._existed(leaf):
                self.largest = max(self.largest, leaf.nbytes)
        return made

    def _existed(self, made: torch.Tensor) -> bool:
        """Wrappers of other tensors have no memory of their own."""
        return type(made) is torch.Tensor and made.untyped_storage().data_ptr() in self._before


def measured(policy: Any, work: Callable[[], Any]) -> tuple[Any, int]:
    """Result of `work`, and the bytes of the largest tensor that it made."""
    shards = [parameter.to_local() for parameter in policy.model.parameters()]
    memory = NewMemory({shard.untyped_storage().data_ptr() for shard in shards})
    with torch.no_grad(), memory:
        result = work()
    return result, memory.largest


def exported(ranks: TorchRanks, dtype: torch.dtype, hosts: list[str]) -> tuple[Exported, int, int, int]:
    """Exported tensors; largest tensors that the export and a gather made; numbers of own shards."""
    strategy = Fsdp2Strategy(ranks, CPU)
    policy = strategy.spread(make_policy("qwen3"))
    weights = list(hf_model.named_weights(policy.model))
    host = hosts[ranks.rank]
    tensors, largest = measured(
        policy,
        lambda: export_shards(weights, dtype, ranks, host_id=host, piece_bytes=PIECE_BYTES),
    )
    _, gathered = measured(policy, lambda: [strategy.whole(tensor) for _, tensor in weights])
    own = sum(tensor.to_local().numel() for _, tensor in weights if isinstance(tensor, DTensor))
    content = {each.name: (each.dtype, each.shape, bytes(each.data)) for each in tensors}
    return content, largest, gathered, own


def expected(dtype: str) -> Exported:
    model = make_policy("qwen3").model
    tensors = [hf_model.tensor_bytes(*each, dtype) for each in hf_model.named_weights(model)]
    return {each.name: (each.dtype, each.shape, bytes(each.data)) for each in tensors}


@pytest.mark.parametrize(
    ("dtype", "hosts"),
    [
        ("bfloat16", ["a", "a"]),
        ("float32", ["a", "a", "a"]),  # rows are no multiple of the ranks
        ("bfloat16", ["a", "b", "a"]),  # a rank of another host sends its pieces
    ],
)
def test_ranks_write_their_own_rows_and_none_holds_more(dtype: str, hosts: list[str]) -> None:
    results = on_ranks(len(hosts), exported, getattr(torch, dtype), hosts)
    (first, *_), *others = results
    assert first == expected(dtype)  # bit for bit
    assert all(content == {} for content, *_ in others)
    total = sum(parameter.numel() for parameter in make_policy("qwen3").model.parameters())
    for _, largest, gathered, own in results:
        assert largest <= PIECE_BYTES
        assert gathered > 10 * PIECE_BYTES  # a gather makes whole tensors
        assert own < 0.6 * total
    assert sum(own for *_, own in results) == total


@pytest.mark.parametrize("shape", [(7, 3), (8,), (2, 5), (1, 4), (64, 2, 2)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_parts_of_ranks_cover_a_tensor_once_and_in_order(
    shape: tuple[int, ...], num_ranks: int
) -> None:
    parts = [rows_of(rank, num_ranks, shape) for rank in range(num_ranks)]
    places = [place for first, count in parts for place in range(first, first + count)]
    assert places == list(range(torch.Size(shape).numel()))
    cut = torch.zeros(shape).chunk(num_ranks)
    assert [count for _, count in parts][: len(cut)] == [piece.numel() for piece in cut]


def published(ranks: TorchRanks, settings: LearnerConfig) -> list[Exported]:
    """Whole weights, and those of later versions, as the worker of a rank gives them."""
    worker = made_worker(settings, strategy=Fsdp2Strategy(ranks, CPU))
    return [contents(worker.weights(is_whole)) for is_whole in (True, False)]


def contents(tensors: list[TensorBytes]) -> Exported:
    return {each.name: (each.dtype, each.shape, bytes(each.data)) for each in tensors}


@pytest.mark.parametrize("lora", [None, LoraArgs(r=2)])
def test_a_sharded_worker_publishes_what_one_rank_publishes(lora: LoraArgs | None) -> None:
    settings = replace(CONFIG, lora=lora)
    one = made_worker(settings)
    expected = [contents(one.weights(is_whole)) for is_whole in (True, False)]
    first, second = on_ranks(2, published, settings)
    assert first == expected
    assert second == [{}, {}]
