"""Memory of tensors that is given back and taken again."""

from __future__ import annotations

import torch

from tailrace.offload import Offload


def test_contents_views_and_ties_are_the_same_afterwards_and_the_memory_is_free_meanwhile() -> None:
    joined = torch.randn(6, 5)
    views = list(joined.split(2))
    other = torch.nn.Parameter(torch.randn(7))
    before = joined.clone(), other.detach().clone()
    offload = Offload()
    offload.free([*views, joined, other, other.data], keep=True)
    assert joined.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert offload.num_bytes == 4 * (30 + 7)
    offload.restore()
    assert torch.equal(joined, before[0])
    assert torch.equal(other, before[1])
    views[1].fill_(3.0)
    assert torch.equal(joined[2:4], torch.full((2, 5), 3.0)), "the view left its storage"
    assert offload.num_bytes == 0


def test_caches_come_back_empty() -> None:
    cache = torch.full((3, 4), 7.0)
    offload = Offload()
    offload.free([cache], keep=False)
    offload.restore()
    assert torch.equal(cache, torch.zeros(3, 4))
