"""The attention module of Llama-like decoders, with fewer passes over memory; the same results.

Queries and keys stay where the projections left them, [N, heads, D], as packed attention wants them,
and rotation is two operations. Projections and norms are the module's own: adapters, hooks and sharding
see what they saw. Whether a module is such an attention is found out by trying it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tailrace_learner.core.attention import IMPLEMENTATION, attend
from tailrace_learner.core.layout import PackedRows, lone_tokens

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_NORMS = frozenset({"q_norm", "k_norm"})
_TOLERANCE = 1e-5


class _Rotate(torch.autograd.Function):
    """states * cos + swapped halves of states * sin; the first half of `sin` has its sign changed."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        swapped = grads[0].roll(sin.shape[-1] // 2, -1)
        return torch.addcmul(grads[0] * cos, swapped, sin, value=-1.0), None, None


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = _Rotate.apply(states, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _attend(
    module: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], packed: PackedRows
) -> Tensor:
    """Output [1, N, hidden] of the module for hidden states [1, N, hidden]."""
    heads = (hidden.shape[1], -1, module.head_dim)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (project(hidden).view(heads) for project in projections)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (table[0].unsqueeze(1) for table in embeddings)  # [N, 1, D]
    first, second = sin.chunk(2, -1)
    signed = torch.cat((-first, second), -1)
    output = attend(
        _rotate(query, cos, signed),
        _rotate(key, cos, signed),
        value,
        packed,
        scale=module.scaling,
        window=getattr(module, "sliding_window", None),
    )
    projected: Tensor = module.o_proj(output.flatten(1).unsqueeze(0))
    return projected


def _with_fast_forward(kind: type[nn.Module]) -> type[nn.Module]:
    """The attention's class, faster for packed rows; anything else takes its own forward."""

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        packed = kwargs.get("packed_rows")
        if packed is None or kwargs.get("past_key_values") is not None or hidden_states.dim() != 3:
            return kind.forward(self, hidden_states, position_embeddings, *args, **kwargs)
        return _attend(self, hidden_states, position_embeddings, packed), None

    return type(kind.__name__, (kind,), {"forward": forward})


def use_fast_attention(model: nn.Module) -> int:
    """Replace the forwards that can be; returns how many modules were changed."""
    kinds: dict[type[nn.Module], type[nn.Module] | None] = {}
    changed = 0
    for module in model.modules():
        kind = type(module)
        if not _looks_alike(module):
            continue
        if kind not in kinds:
            kinds[kind] = _with_fast_forward(kind) if _computes_alike(module) else None
        faster = kinds[kind]
        if faster is not None:
            module.__class__ = faster
            changed += 1
    return changed


def _looks_alike(module: nn.Module) -> bool:
    """Whether the module has the parts of such an attention and no others."""
    children = {name for name, _ in module.named_children()}
    config = getattr(module, "config", None)
    # A window of the configuration that is not the layer's own attribute is passed on by other ways.
    has_window = getattr(config, "sliding_window", None) is not None
    return (
        children in (_PROJECTIONS, _PROJECTIONS | _NORMS)
        and not list(module.parameters(recurse=False))
        and hasattr(module, "head_dim")
        and hasattr(module, "scaling")
        and (hasattr(module, "sliding_window") or not has_window)
        and getattr(config, "_attn_implementation", "") == IMPLEMENTATION
    )


@torch.no_grad()
def _computes_alike(module: Any) -> bool:
    """Whether the module gives the same for two random rows."""
    weight = module.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, 7, weight.shape[1]), generator=generator).to(weight)
    angles = torch.randn((1, 7, module.head_dim // 2), generator=generator).to(weight)
    embeddings = (angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2))
    packed = lone_tokens([3, 4], weight.device)
    try:
        expected = module(hidden, embeddings, None, packed_rows=packed)[0]
        found = _attend(module, hidden, embeddings, packed)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it wants other things than we give
        return False
    return bool(torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE))
