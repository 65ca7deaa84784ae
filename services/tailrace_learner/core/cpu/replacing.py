"""Replacement of module forwards by faster ones, where a trial gives the same results.

Every module is tried: modules of one class may differ, in rotation or in their window. A replaced class
names its own in `replaces`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tailrace_learner.core.batch.layout import PackedRows, lone_tokens

_TOLERANCE = 1e-5

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

    Its window, if it has one, is made shorter than the rows.
    """
    weight = attention.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, 7, weight.shape[1]), generator=generator).to(weight)
    angles = torch.randn((1, 7, attention.head_dim // 2), generator=generator).to(weight)
    embeddings = (angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2))
    packed = lone_tokens([3, 4], weight.device)
    window = getattr(attention, "sliding_window", None)
    try:
        if window is not None:
            attention.sliding_window = 2
        expected = own(module, hidden, embeddings, packed)
        found = fast(module, hidden, embeddings, packed)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # its forward takes other arguments
        return False
    finally:
        if window is not None:
            attention.sliding_window = window
    return bool(torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE))
