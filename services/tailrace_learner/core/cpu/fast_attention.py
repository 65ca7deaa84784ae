"""Attention module of Llama-like decoders, with fewer passes over memory and the same results.

Queries and keys stay where the projections left them, [N, heads, D], as packed attention needs them,
and rotation is two operations. Projections and norms are the module's own, so adapters, hooks and
sharding work as before. A trial shows whether a module is such an attention.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tailrace_learner.core.batch.layout import PackedRows
from tailrace_learner.core.cpu.replacing import gives_the_same, replace_forwards
from tailrace_learner.core.model.attention import IMPLEMENTATION, attend

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_NORMS = frozenset({"q_norm", "k_norm"})


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
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = tuple(project(hidden[0]) for project in projections)
    projected: Tensor = module.o_proj(attended(module, heads, embeddings, packed).unsqueeze(0))
    return projected


def attended(
    module: Any, heads: tuple[Tensor, ...], embeddings: tuple[Tensor, Tensor], packed: PackedRows
) -> Tensor:
    """Input of the last projection [N, H * D], from queries, keys and values [N, heads * D]."""
    query, key, value = (states.view(len(states), -1, module.head_dim) for states in heads)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, signed = _rotation(embeddings, packed)
    output = attend(
        _rotate(query, cos, signed),
        _rotate(key, cos, signed),
        value,
        packed,
        scale=module.scaling,
        window=getattr(module, "sliding_window", None),
    )
    return output.flatten(1)


def _rotation(embeddings: tuple[Tensor, Tensor], packed: PackedRows) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, D], the latter as `_Rotate` needs it; made once for all layers."""
    cos, sin = embeddings
    found = packed.made.get("rotation")
    if found is None or found[0] is not sin:
        first, second = sin[0].unsqueeze(1).chunk(2, -1)
        found = packed.made["rotation"] = (sin, torch.cat((-first, second), -1))
    return cos[0].unsqueeze(1), found[1]


def _with_fast_forward(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of the attention's class, faster for packed rows; other input takes its own forward."""

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

    made = {"forward": forward, "takes_packed_rows": True, "replaces": kind}
    return type(kind.__name__, (kind,), made)


def use_fast_attention(model: nn.Module) -> None:
    """Replaces the forwards that can be replaced."""
    replace_forwards(
        model, looks_alike=_looks_alike, computes_alike=_computes_alike, faster=_with_fast_forward
    )


def is_fast_attention(module: nn.Module) -> bool:
    """Tells whether the module's forward was replaced."""
    return getattr(type(module), "takes_packed_rows", False)


def _looks_alike(module: nn.Module) -> bool:
    """Tells whether the module has the parts of such an attention and no others."""
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


def _computes_alike(module: Any) -> bool:
    def own(
        module: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], packed: PackedRows
    ) -> Tensor:
        output: Tensor = module(hidden, embeddings, None, packed_rows=packed)[0]
        return output

    return gives_the_same(own, _attend, module, module)
