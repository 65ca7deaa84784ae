"""Replacement of module forwards by faster ones, where a trial gives the same results.

Every module is tried: modules of one class may differ, in rotation or in their window. A replaced class
names its own in `replaces`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tailrace_learner.core.batch.layout import PackedRows, lone_tokens

_TOLERANCE = 1e-5
_LOUD = 1e3  # a factor that takes states beyond every clip
_NUM_LOUD = 3

# Output [1, N, hidden] of a module for hidden states [1, N, hidden], cos and sin of the positions.
Compute = Callable[[Any, Tensor, tuple[Tensor, Tensor], PackedRows], Tensor]


def replace_forwards(
    model: nn.Module,
    *,
    looks_alike: Callable[[Any], bool],
    computes_alike: Callable[[Any], bool],
    faster: Callable[[type[nn.Module]], type[nn.Module]],
) -> None:
    """Gives modules that compute alike the `faster` subclass of their own."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "replaces") or not (looks_alike(module) and computes_alike(module)):
            continue
        if kind not in kinds:
            kinds[kind] = faster(kind)
        module.__class__ = kinds[kind]


def use_own_forwards(model: nn.Module) -> None:
    """Gives all modules their own classes back."""
    for module in model.modules():
        while replaced := getattr(type(module), "replaces", None):
            module.__class__ = replaced


@torch.no_grad()
def gives_the_same(own: Compute, fast: Compute, module: Any, attention: Any) -> bool:
    """Tells whether two ways to compute `module` agree on two random rows; `attention` is in it.

    Its window, if it has one, is made shorter than the rows. Loud states show what a clip changes; they
    are drawn several times, since rounding decides near ties of such large scores.
    """
    trial = partial(_agrees, own, fast, module, attention)
    return trial(1.0, 0) and any(trial(_LOUD, seed) for seed in range(_NUM_LOUD))


def _agrees(own: Compute, fast: Compute, module: Any, attention: Any, factor: float, seed: int) -> bool:
    """Tells whether the two ways agree on states, norms and biases multiplied by `factor`."""
    weight = attention.q_proj.weight
    generator = torch.Generator().manual_seed(seed)
    hidden = factor * torch.randn((1, 7, weight.shape[1]), generator=generator).to(weight)
    angles = torch.randn((1, 7, attention.head_dim // 2), generator=generator).to(weight)
    embeddings = (angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2))
    packed = lone_tokens([3, 4], weight.device)
    window = getattr(attention, "sliding_window", None)
    try:
        if window is not None:
            attention.sliding_window = 2
        with _louder(module, factor):
            expected = own(module, hidden, embeddings, packed)
            found = fast(module, hidden, embeddings, packed)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # its forward takes other arguments
        return False
    finally:
        if window is not None:
            attention.sliding_window = window
    scale = max(float(expected.abs().max()), 1.0)
    return bool((found - expected).abs().max() <= _TOLERANCE * scale)


@contextmanager
def _louder(module: nn.Module, factor: float) -> Iterator[None]:
    """Multiplies norms and biases; puts them back exactly."""
    kept = [(each, each.clone()) for each in module.parameters() if each.dim() == 1 and factor != 1.0]
    try:
        for parameter, _ in kept:
            parameter.mul_(factor)
        yield
    finally:
        for parameter, values in kept:
            parameter.copy_(values)
