"""Llama-like decoder layers on the CPU, with fewer and larger products and the same results.

A norm's weight is folded into the matrices that read the normed states:

    (w * n) P^T = n (P diag(w))^T,    n = x / rms(x)

so the states are never scaled, neither forward nor backward, and the gradients of P and w both come
from the one product of the upstream gradient with n. Queries, keys and values are one product. Gate
and up are two, since the next operation reads each of them row by row. A layer whose projections are
not plain linear ones at that moment (adapters, hooks that gather shards, another type) takes its own
forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tailrace_learner.core.batch.layout import PackedRows
from tailrace_learner.core.cpu.fast_attention import attended, is_fast_attention, use_fast_attention
from tailrace_learner.core.cpu.kernels import (
    OneDnnLinear,
    add_matmul_t,
    is_plain,
    matmul_t,
    rms_scale,
    use_fast_kernels,
)
from tailrace_learner.core.cpu.replacing import gives_the_same, replace_forwards

_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
_LINEAR = (nn.Linear, OneDnnLinear)

_silu_backward = torch.ops.aten.silu_backward.grad_input


class _NormedProjections(torch.autograd.Function):
    """The RMS norm of states [N, K], times the transposes of matrices [n_i, K]: [N, sum n_i]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, norm: Tensor, epsilon: float, *matrices: Tensor) -> Tensor:
        scale = rms_scale(states, epsilon)
        normed = states * scale
        ctx.save_for_backward(normed, scale, norm, *matrices)
        return matmul_t(normed, torch.cat(matrices).mul_(norm))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, norm, *matrices = ctx.saved_tensors
        joint = torch.cat(matrices)
        of_norm: Tensor | None = None
        of_matrices: Sequence[Tensor | None] = [None] * len(matrices)
        if _trains(ctx):
            of_norm, (of_joint,) = _of_weights(grads, [joint], normed, norm)
            of_matrices = of_joint.split_with_sizes([len(matrix) for matrix in matrices])
        grad = matmul_t(grads[0], joint.mul_(norm).t())
        return _of_states(grad, normed, scale), of_norm, None, *of_matrices


class _NormedGates(torch.autograd.Function):
    """silu(n G^T) * (n U^T) [N, I] of the RMS norm n of states [N, K] and matrices G, U [I, K]."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, norm: Tensor, epsilon: float, of_gate: Tensor, of_up: Tensor
    ) -> Tensor:
        scale = rms_scale(states, epsilon)
        normed = states * scale
        gate, up = matmul_t(normed, of_gate * norm), matmul_t(normed, of_up * norm)
        activated = silu(gate)
        ctx.save_for_backward(normed, scale, norm, of_gate, of_up, gate, up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, norm, *matrices, gate, up, activated = ctx.saved_tensors
        upon_gate, upon_up = grads[0] * up, grads[0] * activated
        _silu_backward(upon_gate, gate, grad_input=upon_gate)
        of_norm: Tensor | None = None
        of_matrices: Sequence[Tensor | None] = [None, None]
        if _trains(ctx):
            of_norm, of_matrices = _of_weights([upon_gate, upon_up], matrices, normed, norm)
        grad = matmul_t(upon_gate, (matrices[0] * norm).t())
        add_matmul_t(grad, upon_up, (matrices[1] * norm).t())
        return _of_states(grad, normed, scale), of_norm, None, *of_matrices


def _trains(ctx: Any) -> bool:
    """Tells whether the norm's weight or a matrix needs a gradient."""
    return any((*ctx.needs_input_grad[1:2], *ctx.needs_input_grad[3:]))


def _of_weights(
    grads: Sequence[Tensor], matrices: Sequence[Tensor], normed: Tensor, norm: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the norm's weight [K] and of matrices [n, K], given those of products [N, n]."""
    products = [matmul_t(grad.t(), normed.t()) for grad in grads]
    along = [
        torch.linalg.vecdot(product, matrix, dim=0)
        for product, matrix in zip(products, matrices, strict=True)
    ]
    return torch.stack(along).sum(0), [product.mul_(norm) for product in products]


def _of_states(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the states, given that of their norm without its weight, which is overwritten."""
    along = torch.linalg.vecdot(grad, normed).div_(grad.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(normed, along, value=-1.0).mul_(scale)


def _normed_projections(states: Tensor, norm: Any, projections: tuple[nn.Linear, ...]) -> Tensor:
    weights = [projection.weight for projection in projections]
    joint: Tensor = _NormedProjections.apply(  # type: ignore[no-untyped-call]
        states, norm.weight, norm.variance_epsilon, *weights
    )
    biases: list[Tensor] = [each.bias for each in projections if each.bias is not None]
    return joint + torch.cat(biases) if biases else joint


def _layer(layer: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], packed: PackedRows) -> Tensor:
    """Output [1, N, hidden] of the layer for hidden states [1, N, hidden]."""
    states, attention, mlp = hidden[0], layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    joint = _normed_projections(states, layer.input_layernorm, projections)
    heads = joint.split_with_sizes([projection.out_features for projection in projections], -1)
    states = states + attention.o_proj(attended(attention, heads, embeddings, packed))
    norm, weights = layer.post_attention_layernorm, (mlp.gate_proj.weight, mlp.up_proj.weight)
    gated: Tensor = _NormedGates.apply(  # type: ignore[no-untyped-call]
        states, norm.weight, norm.variance_epsilon, *weights
    )
    output: Tensor = states + mlp.down_proj(gated)
    return output.unsqueeze(0)


def _with_fast_forward(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of the layer's class, faster for packed rows; other input takes its own forward."""

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        packed = kwargs.get("packed_rows")
        if packed is not None and hidden_states.dim() == 3 and _is_plain(self, hidden_states):
            return _layer(self, hidden_states, position_embeddings, packed)
        return kind.forward(
            self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs
        )

    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


def _is_plain(layer: Any, hidden: Tensor) -> bool:
    """Tells whether the layer's parts are still as they were at the trial."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    read = (*linear, layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(type(module) in _LINEAR for module in linear)
        and not any(_has_hooks(module) for module in (*read, attention, mlp, mlp.act_fn))
        and is_plain(hidden, *(module.weight for module in read))
        and not torch.is_autocast_enabled("cpu")
    )


def _has_hooks(module: nn.Module) -> bool:
    """Tells whether the module has hooks."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    return any(hooks) or bool(module._backward_hooks or module._backward_pre_hooks)


def use_fast_layers(model: nn.Module) -> None:
    """Replaces the forwards that can be replaced."""
    replace_forwards(
        model, looks_alike=_looks_alike, computes_alike=_computes_alike, faster=_with_fast_forward
    )


def _looks_alike(module: Any) -> bool:
    """Tells whether the module has the parts of such a layer and no others, with fast attention."""
    if {name for name, _ in module.named_children()} != _PARTS:
        return False
    parts = {name for name, _ in module.mlp.named_children()}
    has_biases = any(getattr(part, "bias", None) is not None for part in module.mlp.children())
    return is_fast_attention(module.self_attn) and parts == _MLP_PARTS and not has_biases


def _computes_alike(layer: Any) -> bool:
    def own(
        layer: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], packed: PackedRows
    ) -> Tensor:
        output: Tensor = layer(hidden, position_embeddings=embeddings, packed_rows=packed)
        return output

    return gives_the_same(own, _layer, layer, layer.self_attn)


def use_cpu_kernels(model: nn.Module) -> int:
    """Replaces all forwards that can be faster on the CPU; returns how many modules have such ones."""
    use_fast_attention(model)
    use_fast_kernels(model)
    use_fast_layers(model)
    return sum(hasattr(type(module), "replaces") for module in model.modules())
