"""Forward of Llama-like decoders with few kernels: the arithmetic of the modules, less overhead.

Serves `llama`, `mistral`, `qwen2` and `qwen3` with static rope and full attention. Projections of the
same input become one matrix. The parameters of the modules become views of it, so that no weight is
held twice and an update of the modules updates this forward. `forward.load_model` checks that it agrees
with the model's own forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, rms_norm, silu

from tailrace_inference.engine.attention import AttentionStep, ShapeProbe, Variant
from tailrace_inference.engine.linear import as_read, project, project_onto

LLAMA_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "relu": relu}


def supports_llama_forward(config: Any) -> bool:
    """True if this forward serves models of this Hugging Face configuration."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_MODEL_TYPES
        and config.hidden_act in _ACTIVATIONS
        and layer_types == {"full_attention"}
        and (config.model_type != "mistral" or not getattr(config, "sliding_window", None))
        and rope.get("rope_type", "default") in _STATIC_ROPE
        and not rope.get("partial_rotary_factor")
        and not getattr(config, "mlp_bias", False)
    )


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor  # [(H + 2 KH) * D, hidden]
    qkv_bias: Tensor | None
    out: Tensor  # [hidden, H * D]
    out_bias: Tensor | None
    gate_up: Tensor  # [2 * inner, hidden]
    down: Tensor  # [hidden, inner]
    head_norm: Tensor | None  # [H + KH, D] weights of the query and key norms
    attention: nn.Module


class LlamaForward:
    """Computes logits of flat tokens directly from the weights of a model."""

    def __init__(self, model: nn.Module, max_len: int) -> None:
        config: Any = model.config
        decoder: Any = model.model
        self._config = config
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._final_norm: Tensor = decoder.norm.weight
        self._head: Tensor = model.lm_head.weight  # type: ignore[union-attr, assignment]
        self._head_bias: Tensor | None = model.lm_head.bias  # type: ignore[union-attr, assignment]
        self._eps = float(config.rms_norm_eps)
        self._eps_tensor = self._embedding.new_tensor(self._eps)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(decoder.layers[0].self_attn.head_dim)
        self._variant = Variant(float(decoder.layers[0].self_attn.scaling))
        self._activation = _ACTIVATIONS[config.hidden_act]
        self._layers = [self._fuse(layer) for layer in decoder.layers]
        self._cos, self._sin = self._rope_tables(decoder.rotary_emb, max_len)
        self.refresh()

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        has_bias = attention.q_proj.bias is not None
        has_head_norm = hasattr(attention, "q_norm")
        heads = self._num_heads + self._num_kv_heads
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            post_norm=layer.post_attention_layernorm.weight,
            qkv=_joined([part.weight for part in qkv]),
            qkv_bias=_joined([part.bias for part in qkv]) if has_bias else None,
            out=_joined([attention.o_proj.weight]),
            out_bias=attention.o_proj.bias,
            gate_up=_joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=_joined([mlp.down_proj.weight]),
            head_norm=self._embedding.new_empty((heads, self._head_dim)) if has_head_norm else None,
            attention=attention,
        )

    def _rope_tables(self, rotary: Any, max_len: int) -> tuple[Tensor, Tensor]:
        """cos and sin [max_len, 1, D]; the first half of sin is negative, as the rotation needs it."""
        positions = torch.arange(max_len, device=self._embedding.device).unsqueeze(0)
        cos, sin = rotary(self._embedding[:1].unsqueeze(0), positions)
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0].unsqueeze(1).contiguous(), signed.unsqueeze(1).contiguous()

    def refresh(self) -> None:
        """Copies parameters that are not views; to be called after a change of the modules."""
        for layer in self._layers:
            if layer.head_norm is not None:
                attention: Any = layer.attention
                layer.head_norm[: self._num_heads] = attention.q_norm.weight
                layer.head_norm[self._num_heads :] = attention.k_norm.weight

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """Logits [n, vocabulary] of the flat tokens at `last` [n] among `ids` [T]."""
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        hidden = self._embedding.index_select(0, ids)
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, hidden, cos, sin, step)
            if index == final:  # after the last attention only sampled tokens matter
                attended, hidden = attended.index_select(0, last), hidden.index_select(0, last)
            hidden = project_onto(hidden, attended, layer.out, layer.out_bias)
            hidden = self._mlp(layer, hidden)
        return project(self._norm(hidden, self._final_norm), self._head, self._head_bias)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: AttentionStep | ShapeProbe,
    ) -> Tensor:
        """Attention output [T, H * D] before its projection."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        states = project(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        states = states.view(len(hidden), heads + 2 * kv_heads, self._head_dim)
        rotated = states[:, : heads + kv_heads]
        if layer.head_norm is not None:
            rotated = self._norm(rotated, layer.head_norm)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        return step.attend(
            index, rotated[:, :heads], rotated[:, heads:], states[:, heads + kv_heads :], self._variant
        )

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        inner = project(self._norm(hidden, layer.post_norm), layer.gate_up)
        gate, up = inner.chunk(2, dim=-1)
        return project_onto(hidden, self._activation(gate) * up, layer.down)

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in float32."""
        if states.device.type != "cpu":
            return weight * rms_norm(states, states.shape[-1:], eps=self._eps)
        if states.dtype == torch.float32:  # torch's own norm runs eleven operators
            norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / states.shape[-1])
            return (states * scale.rsqrt_()).mul_(weight)
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return weight * (wide * scale).to(states.dtype)


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """Stacks parameters along their first dimension for `project`; they become views of the result."""
    joined = torch.cat([parameter.data for parameter in parameters])
    if joined.dim() == 2:
        joined = as_read(joined)
    start = 0
    for parameter in parameters:
        rows = parameter.shape[0]
        parameter.data = joined[start : start + rows]
        start += rows
    return joined
