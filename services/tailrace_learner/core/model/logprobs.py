"""Log-probabilities and entropies of sampled tokens, without all logits in memory.

Only hidden states that predict a trained token reach the output matrix, `chunk_tokens` at a time. The
backward pass computes each chunk's logits again, unless the vocabulary is so small that they are no
larger than what a layer keeps. Exact: the same numbers as over the full [M, V] logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tailrace_learner.core.cpu.kernels import matmul_t

# Log-probabilities are kept for a vocabulary of up to so many times the hidden size.
MAX_KEPT_RATIO = 4


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        inputs: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        states, matrix = hidden.to(inputs), weight.to(inputs)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        learner_logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(learner_logprobs)
        keeps = len(weight) <= MAX_KEPT_RATIO * weight.shape[1]
        kept: list[Tensor] = []
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            log_all = _log_softmax(states[part], matrix, temperature)
            learner_logprobs[part] = log_all.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -(log_all.exp() * log_all).sum(-1)
            if keeps:
                kept.append(log_all)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        ctx.temperature, ctx.chunk_tokens, ctx.inputs = temperature, chunk_tokens, inputs
        ctx.set_materialize_grads(False)
        return learner_logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        states, matrix = hidden.to(ctx.inputs), weight.to(ctx.inputs)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for index, start in enumerate(range(0, len(targets), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            log_all = kept[index] if kept else _log_softmax(states[part], matrix, ctx.temperature)
            grad = _grad_logits(
                log_all, targets[part], entropy[part], [g if g is None else g[part] for g in grads]
            )
            grad = grad.div_(ctx.temperature).to(ctx.inputs)
            grad_hidden[part] = _product(grad, matrix.t())
            if grad_weight is not None:
                grad_weight += _product(grad.t(), states[part].t())
        return grad_hidden, grad_weight, None, None, None, None


class _WideProduct(torch.autograd.Function):
    """States [..., H] times a matrix [V, H] transposed: factors in bfloat16, sums in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.dtypes, ctx.shape = (states.dtype, weight.dtype), states.shape
        states, weight = states.flatten(0, -2).bfloat16(), weight.bfloat16()
        ctx.save_for_backward(states, weight)
        with torch.autocast(states.device.type, enabled=False):
            return _product(states, weight).view(*ctx.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        states, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2).bfloat16()
        of_weight: Tensor | None = None
        with torch.autocast(grad.device.type, enabled=False):
            of_states = _product(grad, weight.t()).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                of_weight = _product(grad.t(), states.t()).to(ctx.dtypes[1])
        return of_states.view(ctx.shape), of_weight


def wide_linear(layer: nn.Linear, states: Tensor) -> Tensor:
    """Output [..., V] float32 of a linear layer in bfloat16, as `token_logprobs` computes logits."""
    product: Tensor = _WideProduct.apply(states, layer.weight)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] times right [N, K] transposed; of bfloat16 the float32 sums, not rounded."""
    if left.dtype != torch.bfloat16:
        return matmul_t(left, right)
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return matmul_t(left.float(), right.float())


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = _product(hidden, weight)
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _grad_logits(
    log_all: Tensor, targets: Tensor, entropy: Tensor, grads: list[Tensor | None]
) -> Tensor:
    """Gradient of the scaled logits [m, V], given those of log pi and entropy [m]."""
    grad_log_pi, grad_entropy = grads
    result = log_all.exp()
    if grad_entropy is None:
        assert grad_log_pi is not None
        result.mul_(-grad_log_pi[:, None])
    else:
        upon = (log_all + entropy[:, None]).mul_(-grad_entropy[:, None])
        result.mul_(upon if grad_log_pi is None else upon.sub_(grad_log_pi[:, None]))
    if grad_log_pi is not None:
        result.scatter_add_(-1, targets[:, None], grad_log_pi[:, None])
    return result


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    bfloat16: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability [M] of each target and entropy [M] of its distribution, both differentiable.

    Both are float32, or float64 if `hidden` is. `hidden` [M, H] predicts `targets` [M]; `weight` [V,
    H] is the output matrix. With `bfloat16` the factors of products are rounded to it and their sums
    are not: logits, probabilities and the matrix's gradient keep float32.
    """
    inputs = torch.bfloat16 if bfloat16 else hidden.dtype
    outputs: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_tokens, inputs
    )
    return outputs


def logprobs_of_logits(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Does the same as `token_logprobs` by a head that is more than a matrix, [m, H] -> [m, V]."""

    def values(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(states)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_all = torch.log_softmax(wide / temperature, dim=-1)
        picked = log_all.gather(-1, chosen[:, None]).squeeze(-1)
        return picked, -(log_all.exp() * log_all).sum(-1)

    parts = [
        checkpoint(values, states, chosen, use_reentrant=False)
        for states, chosen in zip(
            torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True
        )
    ]
    learner_logprobs, entropy = (torch.cat(found) for found in zip(*parts, strict=True))
    return learner_logprobs, entropy
