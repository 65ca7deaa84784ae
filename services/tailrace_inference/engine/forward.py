"""Builds a model from its Hugging Face configuration, with a forward that is right for it.

Invariant: a model is only returned with a forward that passed `forward_check`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.loaded_model import keep_weights
from tailrace.model_probe import context_tokens
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import UnsupportedModelError, register_attention
from tailrace_inference.engine.cache_size import DeviceError, NoRoomError, Sizes, cache_tokens
from tailrace_inference.engine.forward_check import Choice, ForwardChooser
from tailrace_inference.engine.kv_cache import KVShape
from tailrace_inference.engine.linear import select_matmul
from tailrace_inference.engine.row_forward import TOKEN_LAYERS


class LoadedModel:
    """A model on its device, with the chosen forward."""

    def __init__(self, model: Any, config: InferenceConfig, *, merges_adapters: bool = False) -> None:
        self.model: nn.Module = model
        self._config = config
        self._merges_adapters = merges_adapters
        weight: Tensor = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._chooser = ForwardChooser(model, config, self._room)
        # Measured once: later the cache and staged weights lie there too, and its size leaves room.
        self._memory = _device_memory(self.device)
        self._take(self._chooser.choose(is_stirred=True))

    def recheck(self) -> bool:
        """Checks the forward on the weights as they are; True if a slower one, or a bound, replaces it.

        `UnsupportedModelError` if none is right.
        """
        before = self.forward, self.max_len
        self._take(self._chooser.choose(is_stirred=False))
        return before != (self.forward, self.max_len)

    def _take(self, choice: Choice) -> None:
        self.choice = choice
        self.forward, self.layers = choice.forward, choice.layers
        self.cache_dtype = torch.float32 if choice.holds_tokens else self.dtype
        self.cache_tokens, self.max_len = self._room(choice.layers)
        if choice.max_tokens is not None:
            self.max_len = min(self.max_len, choice.max_tokens)

    def _room(self, layers: list[KVShape]) -> tuple[int, int]:
        """Tokens of the cache, and of the longest sequence."""
        num_cached = _cache_tokens(
            self._config, self.model, layers, self._memory, self._merges_adapters
        )
        return num_cached, max_sequence(self._config, self.model.config, num_cached)


def pick_device(config: InferenceConfig) -> torch.device:
    """The configured device; `auto` takes CUDA if there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "inference.device is 'cuda', but torch finds no CUDA device: set it to auto or cpu"
        )
    return torch.device(config.device)


def load_model(
    config_json: bytes, config: InferenceConfig, *, merges_adapters: bool = False
) -> LoadedModel:
    """Builds the architecture with random weights; raises `UnsupportedModelError` or `DeviceError`.

    `merges_adapters`: later versions are adapters alone.
    """
    register_attention()
    try:
        select_matmul(config.cpu_matmul)
    except ValueError as error:
        raise DeviceError(f"inference.{error}") from error
    model = build_model(config_json, config)
    return LoadedModel(model, config, merges_adapters=merges_adapters)


def build_model(config_json: bytes, config: InferenceConfig) -> Any:
    """The model of transformers with random weights; raises as `load_model` does."""
    model_type = str(json.loads(config_json).get("model_type", ""))
    try:
        with foreign_code("transformers"):
            return _build(config_json, config, pick_device(config))
    except ForeignCodeError as error:  # unknown to transformers, or a wrong configuration
        if isinstance(error.error, DeviceError):
            raise error.error from error
        raise UnsupportedModelError(model_type, " ".join(str(error.error).split())) from error


def _cache_tokens(
    config: InferenceConfig,
    model: Any,
    layers: list[KVShape],
    memory: tuple[int, int],
    merges_adapters: bool,
) -> int:
    """Tokens of the cache; raises `DeviceError` without room or without a CUDA device.

    `memory`: that of the device with one set of weights, see `_device_memory`.
    """
    if layers is TOKEN_LAYERS:  # its sequences are kept elsewhere
        return config.kv_cache_tokens
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
        merges_adapters=merges_adapters,
    )
    free, total = memory
    try:
        return cache_tokens(config, layers, sizes, total, free)
    except NoRoomError as error:
        raise DeviceError(str(error)) from error


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that are free, and all of them; 0 of the CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def _build(config_json: bytes, config: InferenceConfig, device: torch.device) -> Any:
    """Builds the architecture with random weights and its own attention."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-config-"
    ) as folder:  # some values need its reader
        (Path(folder) / "config.json").write_bytes(config_json)
        hf_config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for each in (hf_config, hf_config.get_text_config()):
        if getattr(each, "output_router_logits", False):  # for a loss that no engine computes
            each.output_router_logits = False
    dtype = _pick_dtype(config, hf_config, device)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(hf_config, dtype=dtype, attn_implementation="eager")
    keep_weights(model)
    return model.eval().requires_grad_(False)


def _pick_dtype(config: InferenceConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if device.type == "cpu":
        return torch.float32
    named = getattr(hf_config, "dtype", None) or "bfloat16"
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named))


def max_sequence(config: InferenceConfig, hf_config: Any, num_cached: int) -> int:
    """Longest sequence that the model, the configuration and the cache allow."""
    limits = [num_cached]
    limits += [limit for limit in (context_tokens(hf_config), config.max_model_len) if limit]
    return min(limits)
