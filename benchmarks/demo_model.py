"""The demo's model, and a plain batched sampler for it with a preallocated KV cache.

`KvSampler` is written for one process that plays many episodes in lock step: all rows are at the same
slot of the cache, rows that insert fewer tokens have gaps, which no query attends to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

HEAD_DIM = 32
ROPE_THETA = 100.0

Weights = list[dict[str, Tensor]]  # the top first, then the layers


def build_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.5M parameters with random weights, fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        intermediate_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    return Qwen3ForCausalLM(config)


class KvSampler:
    """Samples tokens for `num_rows` rows; weights are a copy taken by `load`."""

    def __init__(self, model: Qwen3ForCausalLM, max_rows: int, max_slots: int) -> None:
        config = model.config
        self._num_heads = config.num_attention_heads
        self._eps = config.rms_norm_eps
        shape = (config.num_hidden_layers, 2, max_rows, self._num_heads, max_slots, HEAD_DIM)
        self._cache = torch.zeros(shape)
        self._valid = torch.zeros((max_rows, max_slots), dtype=torch.bool)
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(max_slots), frequencies)
        self._cos, self._sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self.load(snapshot(model))
        self.start(0)

    def load(self, weights: Weights) -> None:
        """Use the weights of a `snapshot`."""
        self._top, *self._layers = weights

    def start(self, num_rows: int, *, greedy: bool = False) -> None:
        """Forget everything and begin `num_rows` empty rows; `greedy`: take the likeliest tokens."""
        self.num_rows = num_rows
        self._greedy = greedy
        self._used = 0
        self._valid[:] = False
        self._lengths = torch.zeros(num_rows, dtype=torch.long)
        self._has_gaps = False

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        count, used = len(rows), self._used
        self._cache[:, :, :count, :, :used] = self._cache[:, :, rows, :, :used]
        self._valid[:count] = self._valid[rows]
        self._lengths = self._lengths[rows]
        self.num_rows = count

    @torch.no_grad()
    def extend(self, token_ids: Tensor, present: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Append [rows, t] ids, choose one token after the last: ids [rows], log-probabilities [rows].

        `present` [rows, t] is False at gaps; None: there are none. The last column is always present.
        """
        logprobs = functional.log_softmax(self._forward(token_ids, present), dim=-1)
        noise = torch.ones_like(logprobs) if self._greedy else torch.empty_like(logprobs).exponential_()
        sampled = (logprobs - noise.log()).argmax(-1)
        return sampled, logprobs.gather(1, sampled[:, None])[:, 0]

    def _forward(self, token_ids: Tensor, present: Tensor | None) -> Tensor:
        """Logits [rows, vocabulary] after the last column."""
        rows, width = token_ids.shape
        begin, end = self._used, self._used + width
        counts = torch.ones(rows, width, dtype=torch.long) if present is None else present.long()
        positions = self._lengths[:, None] + counts.cumsum(1) - 1
        self._lengths = positions[:, -1] + 1
        self._valid[:rows, begin:end] = counts.bool()
        self._has_gaps |= present is not None
        self._used = end
        mask = self._mask(rows, begin, end)
        rope = (self._cos[positions][:, None], self._sin[positions][:, None])
        hidden = functional.embedding(token_ids, self._top["embedding"])
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(index, layer, hidden, rope, mask)
            hidden = hidden + self._feed_forward(layer, hidden)
        last = self._norm(hidden[:, -1], self._top["norm"])
        return functional.linear(last, self._top["embedding"])

    def _mask(self, rows: int, begin: int, end: int) -> Tensor | None:
        """Attention mask of the queries of slots `begin` to `end`."""
        if end - begin == 1 and not self._has_gaps:
            return None
        causal = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
        return causal & self._valid[:rows, None, None, :end] if self._has_gaps else causal

    def _attend(
        self,
        index: int,
        layer: dict[str, Tensor],
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        rows, width, _ = hidden.shape
        qkv = functional.linear(self._norm(hidden, layer["input_norm"]), layer["qkv"])
        query, key, value = qkv.view(rows, width, 3, self._num_heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        cache = self._cache[index, :, :rows]
        new = slice(self._used - width, self._used)
        cache[0, :, :, new] = _rotate(self._norm(key, layer["key_norm"]), rope)
        cache[1, :, :, new] = value
        attended = functional.scaled_dot_product_attention(
            _rotate(self._norm(query, layer["query_norm"]), rope),
            cache[0, :, :, : self._used],
            cache[1, :, :, : self._used],
            attn_mask=mask,
        )
        return functional.linear(attended.transpose(1, 2).reshape(rows, width, -1), layer["output"])

    def _feed_forward(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer["post_norm"])
        gate, up = functional.linear(normed, layer["gate_up"]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, layer["down"])

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(values, weight.shape, weight, self._eps)


def _rotate(values: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = values.chunk(2, -1)
    return values * rope[0] + torch.cat((-second, first), -1) * rope[1]


@torch.no_grad()
def snapshot(model: Qwen3ForCausalLM) -> Weights:
    """A copy of the weights as the sampler uses them."""
    top = model.model
    weights = [{"embedding": top.embed_tokens.weight.clone(), "norm": top.norm.weight.clone()}]
    for layer in top.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights.append(
            {
                "input_norm": layer.input_layernorm.weight.clone(),
                "qkv": torch.cat([projection.weight for projection in projections]),
                "query_norm": attention.q_norm.weight.clone(),
                "key_norm": attention.k_norm.weight.clone(),
                "output": attention.o_proj.weight.clone(),
                "post_norm": layer.post_attention_layernorm.weight.clone(),
                "gate_up": torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight]),
                "down": feed_forward.down_proj.weight.clone(),
            }
        )
    return weights
