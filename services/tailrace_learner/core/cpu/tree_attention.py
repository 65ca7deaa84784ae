"""Attention of packed rows on the CPU, piece by piece: no prefix is computed or copied twice.

A token attends to its own sequence, causally, and to the whole segments before it, as branches list
them. Each such pair is a piece for torch's fused kernel: sequences of similar length as a dense batch
(`Bucket`), and all tokens that continue a segment as queries against its keys (`Branch`). With s_p
the log-sum-exp of piece p's scores and o_p its output, the output over all pieces is

    s = logsumexp_p s_p,    o = sum_p exp(s_p - s) o_p

and the kernel's gradients of a piece are those of the whole when it gets o and s in place of o_p and
s_p: it computes the probabilities exp(score - s) and the products do . o from them (Ring Attention,
2310.01889, does this across devices). Exact in float32 and float64.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tailrace_learner.core.batch.layout import Branch, Bucket, PackedRows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D]; a token attends to `window` tokens back, itself included."""
    output: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, packed, scale, window
    )
    return output


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedRows,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        is_double = query.dtype == torch.float64
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float64 if is_double else torch.float32)
        for bucket in packed.buckets:
            mask = _own_mask(bucket, window, query)
            dense = [_dense(bucket, states) for states in (query, key, value)]
            found, sums = _forward(*dense, 0.0, mask is None, attn_mask=mask, scale=scale)
            _put(bucket, output, found)
            _put(bucket, log_sums, sums)
        for branch in packed.branches:
            mask = _branch_mask(branch, packed.position_ids, window, query)
            pieces = _pieces(branch, query, key, value)
            found, sums = _forward(*pieces, 0.0, False, attn_mask=mask, scale=scale)
            if mask is not None:  # the kernel gives 0 where no key is visible
                sums = sums.masked_fill((mask == -math.inf).all(-1), -math.inf)
            _merge(branch, output, log_sums, found, sums)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.given = packed, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        packed, scale, window = ctx.given
        upstream = grads[0].contiguous()
        repeats = any(bucket.repeats for bucket in packed.buckets)
        start = torch.zeros_like if repeats else torch.empty_like
        found = [torch.empty_like(query), start(key), start(value)]
        for bucket in packed.buckets:
            mask = _own_mask(bucket, window, query)
            grad = _dense(bucket, upstream, fill=0.0)
            dense = [_dense(bucket, states) for states in (query, key, value, output, log_sums)]
            parts = _backward(grad, *dense, 0.0, mask is None, attn_mask=mask, scale=scale)
            _put(bucket, found[0], parts[0])
            for whole, part in zip(found[1:], parts[1:], strict=True):
                _add(bucket, whole, part)
        for branch in packed.branches:
            mask = _branch_mask(branch, packed.position_ids, window, query)
            later = [_later(branch, states) for states in (upstream, output, log_sums)]
            pieces = _pieces(branch, query, key, value)
            parts = _backward(later[0], *pieces, *later[1:], 0.0, False, attn_mask=mask, scale=scale)
            found[0][branch.stop : branch.end] += parts[0][0].transpose(0, 1)
            found[1][branch.start : branch.stop] += parts[1][0].transpose(0, 1)
            found[2][branch.start : branch.stop] += parts[2][0].transpose(0, 1)
        return (*found, None, None, None)


def _dense(bucket: Bucket, states: Tensor, fill: float | None = None) -> Tensor:
    """Dense states [rows, H, length, ...]; padding repeats a token, or is `fill`."""
    if bucket.places is None:
        tokens = states[bucket.start : bucket.stop]
    elif fill is None or bucket.filled is None:
        tokens = states.index_select(0, bucket.places)
    else:
        assert bucket.tokens is not None
        tokens = states.new_full((len(bucket.places), *states.shape[1:]), fill)
        tokens.index_copy_(0, bucket.filled, states.index_select(0, bucket.tokens))
    return tokens.view(bucket.num_rows, bucket.max_len, *states.shape[1:]).transpose(1, 2)


def _put(bucket: Bucket, whole: Tensor, dense: Tensor) -> None:
    """Writes results of the bucket's tokens to their places in `whole` [N, H, ...]."""
    part = dense.transpose(1, 2).flatten(0, 1)
    if bucket.places is None:
        whole[bucket.start : bucket.stop] = part
        return
    assert bucket.tokens is not None
    part = part if bucket.filled is None else part.index_select(0, bucket.filled)
    whole.index_copy_(0, bucket.tokens, part)


def _add(bucket: Bucket, whole: Tensor, dense: Tensor) -> None:
    """Adds what places contribute to their tokens in `whole` [N, H, ...]: zeros where tokens repeat."""
    if not bucket.repeats:
        _put(bucket, whole, dense)
        return
    assert bucket.places is not None
    whole.index_add_(0, bucket.places, dense.transpose(1, 2).flatten(0, 1))  # padding has zeros


def _later(branch: Branch, states: Tensor) -> Tensor:
    """States [1, H, n, ...] of the tokens that continue the segment."""
    return states[branch.stop : branch.end].transpose(0, 1).unsqueeze(0)


def _pieces(branch: Branch, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    own = [states[branch.start : branch.stop].transpose(0, 1).unsqueeze(0) for states in (key, value)]
    return _later(branch, query), *own


def _merge(branch: Branch, output: Tensor, log_sums: Tensor, found: Tensor, sums: Tensor) -> None:
    """Merges a piece's output into that of the pieces before."""
    so_far, new = log_sums[branch.stop : branch.end], sums[0].transpose(0, 1)
    total = torch.logaddexp(so_far, new)
    kept = output[branch.stop : branch.end]
    kept *= (so_far - total).exp_().to(output.dtype).unsqueeze(-1)
    kept.addcmul_(found[0].transpose(0, 1), (new - total).exp_().to(output.dtype).unsqueeze(-1))
    so_far.copy_(total)


def _own_mask(bucket: Bucket, window: int | None, like: Tensor) -> Tensor | None:
    """Mask added to the scores [length, length] of a sequence; None: causal without a window."""
    if window is None or window >= bucket.max_len:
        return None
    places = torch.arange(bucket.max_len)
    distance = places[:, None] - places[None, :]
    return _added((distance >= 0) & (distance < window), like)


def _branch_mask(
    branch: Branch, position_ids: Tensor, window: int | None, like: Tensor
) -> Tensor | None:
    """Mask that is added to the scores [n, length]; None: every token attends to every key."""
    if window is None:
        return None
    seen_from = position_ids[branch.stop : branch.end, None]
    distance = seen_from - position_ids[None, branch.start : branch.stop]
    return None if int(distance[:, 0].max()) < window else _added(distance < window, like)


def _added(is_seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=like.dtype).masked_fill_(~is_seen, -math.inf)
