"""Builds a model from its Hugging Face configuration and computes logits of flat tokens.

Invariant: a model is only returned if a random sequence, computed in chunks over the cache, gives the
logits of the model's own forward. The Llama forward must agree too; otherwise the generic one is used.
"""

import json
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.log import get_logger
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import (
    ATTENTION_NAME,
    STEP_KWARG,
    AttentionStep,
    Group,
    ShapeProbe,
    UnsupportedModelError,
    register_attention,
)
from tailrace_inference.engine.cache_size import NoRoomError, Sizes, cache_tokens
from tailrace_inference.engine.kv_cache import KVCache, KVShape
from tailrace_inference.engine.linear import select_matmul
from tailrace_inference.engine.llama_forward import LlamaForward, supports_llama_forward

log = get_logger(__name__)

# Largest difference of logits at load, in units of their standard deviation.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


class DeviceError(ValueError):
    """The configured device is missing or has no room."""


class Forward(Protocol):
    """Computes logits of flat tokens."""

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """Logits [n, vocabulary] of the flat tokens `last` [n] among `ids` [T] at `positions` [T]."""

    def refresh(self) -> None:
        """Takes over changed parameters of the modules."""


class GenericForward:
    """The model's own modules, with the attention of this engine."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """See `Forward`."""
        out = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=last,
            **{STEP_KWARG: step},
        )
        logits: Tensor = out.logits[0]
        return logits

    def refresh(self) -> None:
        """See `Forward`; nothing is copied here."""


class LoadedModel:
    """A model on its device, with the chosen forward."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        layers: list[KVShape],
        max_len: int,
        cache_tokens: int,
    ) -> None:
        self.model = model
        self.forward = forward
        self.layers = layers
        self.max_len = max_len
        self.cache_tokens = cache_tokens  # that fit into the cache
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        config: Any = model.config
        self.vocab_size = int(config.get_text_config().vocab_size)


def _choose_forward(
    model: nn.Module,
    generic: GenericForward,
    expected: Tensor,
    layers: list[KVShape],
    max_len: int,
    config: InferenceConfig,
) -> Forward:
    """The Llama forward if it is allowed, serves this model and agrees; else the generic one."""
    dtype = next(model.parameters()).dtype
    if config.forward == "generic" or not supports_llama_forward(model.config):
        return generic
    llama = LlamaForward(model, max(max_len, _PROBE_TOKENS))
    error = _disagreement(llama, expected, layers, dtype)
    if error < _TOLERANCE[dtype]:
        return llama
    log.warning("llama_forward_disagrees", error_in_deviations=error)
    return generic


def pick_device(config: InferenceConfig) -> torch.device:
    """The configured device; `auto` takes CUDA if there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "inference.device is 'cuda', but torch finds no CUDA device: set it to auto or cpu"
        )
    return torch.device(config.device)


def load_model(config_json: bytes, config: InferenceConfig) -> LoadedModel:
    """Builds the architecture with random weights; raises `UnsupportedModelError` or `DeviceError`."""
    register_attention()
    try:
        select_matmul(config.cpu_matmul)
    except ValueError as error:
        raise DeviceError(f"inference.{error}") from error
    content = json.loads(config_json)
    model_type = str(content.pop("model_type", ""))
    try:
        model = _build(model_type, content, config, pick_device(config))
    except (DeviceError, UnsupportedModelError):
        raise
    except ValueError as error:  # unknown to transformers, or a wrong configuration
        raise UnsupportedModelError(model_type, str(error)) from error
    dtype = next(model.parameters()).dtype
    expected = _own_logits(model)
    layers = _probe_layers(model, model_type)
    generic = GenericForward(model)
    error_size = _disagreement(generic, expected, layers, dtype)
    if not error_size < _TOLERANCE[dtype]:
        raise UnsupportedModelError(
            model_type, f"its logits differ by {error_size:.3g} standard deviations"
        )
    num_cached = _cache_tokens(config, model, layers)
    max_len = _max_len(config, model.config, num_cached)
    forward = _choose_forward(model, generic, expected, layers, max_len, config)
    return LoadedModel(model, forward, layers, max_len, num_cached)


def _cache_tokens(config: InferenceConfig, model: Any, layers: list[KVShape]) -> int:
    """Tokens of the cache; raises `DeviceError` without room or without a CUDA device."""
    weight: Tensor = next(model.parameters())
    if config.gpu_memory_utilization and weight.device.type != "cuda":
        raise DeviceError(
            "inference.gpu_memory_utilization needs a CUDA device, and torch finds none: remove it and "
            "set inference.kv_cache_tokens instead"
        )
    text_config = model.config.get_text_config()
    sizes = Sizes(
        weights=sum(each.numel() * each.element_size() for each in model.parameters()),
        element=weight.element_size(),
        hidden_size=int(text_config.hidden_size),
        vocab_size=int(text_config.vocab_size),
    )
    is_cuda = weight.device.type == "cuda"
    free, total = torch.cuda.mem_get_info(weight.device) if is_cuda else (0, 0)
    try:
        return cache_tokens(config, layers, sizes, total, free)
    except NoRoomError as error:
        raise DeviceError(str(error)) from error


def _build(
    model_type: str, content: dict[str, Any], config: InferenceConfig, device: torch.device
) -> Any:
    """Builds the architecture with random weights and its own attention."""
    hf_config: Any = AutoConfig.for_model(model_type, **content)
    dtype = _pick_dtype(config, hf_config, device)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(hf_config, dtype=dtype, attn_implementation="eager")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(model_type, "its attention cannot be replaced")
    return model.eval().requires_grad_(False)


def _pick_dtype(config: InferenceConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if device.type == "cpu":
        return torch.float32
    named = getattr(hf_config, "dtype", None) or "bfloat16"
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named))


def _max_len(config: InferenceConfig, hf_config: Any, num_cached: int) -> int:
    """Longest sequence that the model, the configuration and the cache allow."""
    limits = [num_cached]
    model_len = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    limits += [limit for limit in (model_len, config.max_model_len) if limit]
    return min(limits)


_PROBE_TOKENS = 24


def _probe_ids(model: nn.Module) -> Tensor:
    config: Any = model.config
    vocab_size = int(config.get_text_config().vocab_size)
    ids = np.random.default_rng(0).integers(0, vocab_size, _PROBE_TOKENS)
    return torch.from_numpy(ids).to(next(model.parameters()).device)


@torch.inference_mode()
def _own_logits(model: Any) -> Tensor:
    """Logits [T, vocabulary] of the model with its own attention."""
    logits: Tensor = model(input_ids=_probe_ids(model).unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


@torch.inference_mode()
def _probe_layers(model: Any, model_type: str) -> list[KVShape]:
    """Switches to this engine's attention; records the key and value shapes of all layers."""
    probe = ShapeProbe()
    model.set_attn_implementation(ATTENTION_NAME)
    ids = _probe_ids(model)
    positions = torch.arange(len(ids), device=ids.device)
    GenericForward(model).logits(ids, positions, positions, probe)
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if sorted(probe.layers) != list(range(num_layers)):
        seen = len(probe.layers)
        raise UnsupportedModelError(
            model_type, f"only {seen} of {num_layers} layers have plain attention"
        )
    return [probe.layers[index] for index in range(num_layers)]


@torch.inference_mode()
def _disagreement(
    forward: Forward, expected: Tensor, layers: list[KVShape], dtype: torch.dtype
) -> float:
    """Largest difference from the expected logits over three chunks, in standard deviations."""
    block_tokens = 8
    cache = KVCache(layers, 1 + _PROBE_TOKENS // block_tokens, block_tokens, expected.device, dtype)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, expected.shape[1], _PROBE_TOKENS))
    worst = 0.0
    for first, last in ((0, 10), (10, 23), (23, 24)):
        positions = torch.arange(first, last, device=expected.device)
        blocks = torch.arange(1, 4, device=expected.device)
        group = Group(0, last - first, 1, last - first, blocks, positions.unsqueeze(0), None, None)
        step = AttentionStep(cache, positions + block_tokens, [group])
        keep = torch.arange(last - first, device=expected.device)
        got = forward.logits(ids[first:last].to(expected.device), positions, keep, step).float()
        worst = max(worst, float((got - expected[first:last]).abs().max() / expected.std()))
    return worst
