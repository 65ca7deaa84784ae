"""Attention of one step: flat tokens of many sequences, each against its own cache blocks.

The tokens of a step are flat, group after group. The rows of a group have similar numbers of queries
and similar context lengths; each group is one `scaled_dot_product_attention` over gathered blocks.
Invariants: a query at position p sees keys 0..p of its own row only; padding queries repeat a real
one, and their outputs are dropped.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tailrace_inference.engine.kv_cache import KVCache, KVShape
from tailrace_inference.ports import EngineRefusalError

ATTENTION_NAME = "tailrace"
STEP_KWARG = "tailrace_step"

# Tensors that come with a pass and change nothing: positions are in the queries and keys.
_KNOWN_TENSORS = ("position_ids", "cache_position", "position_embeddings")


class UnsupportedModelError(EngineRefusalError):
    """An engine of this package cannot run this architecture. Attributes: `model_type`, `reason`."""

    def __init__(self, model_type: str, reason: str, engine: str = "torch") -> None:
        super().__init__(f"model_type {model_type!r} does not run on the {engine} engine: {reason}")
        self.model_type = model_type
        self.reason = reason


class Variant(NamedTuple):
    """Differences between architectures in the computation of attention scores."""

    scale: float
    window: int = 0  # keys that a query sees, its own included; 0: all earlier keys
    softcap: float = 0.0  # scores are mapped into (-softcap, softcap) by tanh; 0: off
    sinks: Tensor | None = None  # [H] logit per head of a key that has no value


@dataclass(slots=True)
class Group:
    """Rows [B] of one padded attention call, with Q queries and L = blocks * block_tokens keys each."""

    first: int  # flat tokens [first, last) are this group's queries
    last: int
    num_rows: int
    num_queries: int
    blocks: Tensor  # [B * blocks] of the cache
    positions: Tensor  # [B, Q] position of each query
    pad_index: Tensor | None  # [B * Q] flat token of each padded query; None: nothing is padded
    unpad_index: Tensor | None  # [last - first] place of each flat token among the padded ones
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, num_keys: int, repeats: int, window: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, repeats * Q, L], made once per step and kind of layer."""
        key = (repeats, window, dtype)
        found = self.masks.get(key)
        if found is None:
            found = self.masks[key] = self._make_mask(num_keys, repeats, window, dtype)
        return found

    def _make_mask(self, num_keys: int, repeats: int, window: int, dtype: torch.dtype) -> Tensor:
        keys = torch.arange(num_keys, device=self.positions.device)
        queries = self.positions.unsqueeze(-1)
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -math.inf
        )
        mask = mask.unsqueeze(1)
        return mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask


class History(NamedTuple):
    """All tokens of a row up to its last new one."""

    key: int  # the row's first block, which it owns alone
    first: int  # flat index of its first new token
    num_new: int
    tokens: Tensor  # [L] ids


class AttentionStep:
    """Cache slots for the tokens of one step, and the groups that attend together."""

    def __init__(self, cache: KVCache, slots: Tensor, groups: list[Group]) -> None:
        self._cache = cache
        self._slots = slots  # [T]
        self._groups = groups

    def histories(self, ids: Tensor) -> Iterator[History]:
        """Stores token ids [T] in place of keys, in float32; yields what each row holds then."""
        stored = ids.to(torch.float32).view(-1, 1, 1)
        self._cache.write(0, self._slots, stored, stored)
        for group in self._groups:
            blocks = group.blocks.view(group.num_rows, -1)
            tables = self._cache.keys[0].index_select(0, group.blocks).view(group.num_rows, -1)
            width = group.num_queries
            for row, key in enumerate(blocks[:, 0].tolist()):
                first, num_new = group.first + row * width, width
                if group.pad_index is not None:
                    padded = group.pad_index[row * width : (row + 1) * width]
                    first = int(padded[0])
                    num_new = int(padded[-1]) - first + 1
                length = int(group.positions[row, -1]) + 1
                yield History(key, first, num_new, tables[row, :length].to(torch.int64))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Stores `key` [T, KH, D] and `value`, then attends with `query` [T, H, D] -> [T, H * Dv]."""
        self._cache.write(layer, self._slots, key, value)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        parts = [_attend_group(group, query, keys, values, variant) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, variant: Variant
) -> Tensor:
    """Output [n, H * Dv] of a group's n flat queries.

    Queries that share a key head become further queries of that head, so that grouped heads need no
    repeated keys.
    """
    rows, num_queries = group.num_rows, group.num_queries
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    if group.pad_index is None:
        queries = query[group.first : group.last]
    else:
        queries = query.index_select(0, group.pad_index)
    repeats = queries.shape[1] // kv_heads
    k = keys.index_select(0, group.blocks).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, group.blocks).view(rows, -1, kv_heads, values.shape[3]).transpose(1, 2)
    if repeats == 1:
        q = queries.view(rows, num_queries, kv_heads, head_dim).transpose(1, 2)
    else:
        q = queries.view(rows, num_queries, kv_heads, repeats, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, kv_heads, repeats * num_queries, head_dim)
    mask = group.mask(k.shape[2], repeats, variant.window, q.dtype)
    if variant.softcap or variant.sinks is not None:
        out = _attend_explicitly(q, k, v, mask, repeats, variant)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=variant.scale)
    if repeats == 1:
        out = out.transpose(1, 2)
    else:
        out = out.view(rows, kv_heads, repeats, num_queries, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows * num_queries, -1)
    return out if group.unpad_index is None else out.index_select(0, group.unpad_index)


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, repeats: int, variant: Variant
) -> Tensor:
    """Attention [B, KH, repeats * Q, Dv] for variants that no fused kernel computes."""
    scores = torch.matmul(q, k.transpose(2, 3)).float() * variant.scale
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores + mask
    if variant.sinks is not None:
        per_query = scores.shape[2] // repeats
        sinks = variant.sinks.float().view(-1, repeats).repeat_interleave(per_query, dim=1)
        scores = torch.cat((scores, sinks[None, :, :, None].expand(len(scores), -1, -1, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


class ShapeProbe:
    """Replaces an `AttentionStep` once, to record the key and value shapes of each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, KVShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Records the shapes of the layer; returns zeros of the right shape."""
        self.layers[layer] = KVShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros((query.shape[0], query.shape[1] * value.shape[2]))


def tailrace_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `query` [1, H, T, D] -> ([1, T, H, Dv], no weights)."""
    step: AttentionStep | ShapeProbe | None = kwargs.get(STEP_KWARG)
    model_type = str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))
    if step is None:
        raise UnsupportedModelError(model_type, "it does not pass arguments to its attention")
    if reason := _not_computed(query, key, attention_mask, kwargs):
        raise UnsupportedModelError(model_type, reason)
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(model_type, "its attention layers have no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_tokens, num_heads = query.shape[2], query.shape[1]
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    variant = Variant(scale, sliding_window or 0, softcap or 0.0, s_aux)
    out = step.attend(layer, flat[0], flat[1], flat[2], variant)
    return out.view(1, num_tokens, num_heads, -1), None


def _not_computed(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: Mapping[str, Any]
) -> str:
    """Argument of a model's attention that ours does not compute, in words; empty: none."""
    if attention_mask is not None:
        return "its attention has a mask of its own"
    for name, given in kwargs.items():
        if isinstance(given, Tensor) and name not in _KNOWN_TENSORS:
            return f"its attention uses {name!r}"
    return "its attention has more keys than tokens" if key.shape[2] != query.shape[2] else ""


def register_attention() -> None:
    """Registers `attn_implementation="tailrace"` with transformers; may be repeated."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, tailrace_attention)
