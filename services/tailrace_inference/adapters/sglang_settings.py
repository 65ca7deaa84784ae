"""The model and the settings, as SGLang reads them."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from tailrace_inference.adapters.sglang_thread import on_child_error
from tailrace_inference.adapters.sglang_worker import LOADER
from tailrace_inference.adapters.staging import named_dtype, token_bytes, write_model_folder
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineRefusalError
from tailrace_protos.weights import ModelCard

_HICACHE_RATIO = 2.0  # SGLang's default, of the cache on the device
_SPARE_TOKENS = 8  # SGLang keeps a few tokens of each limit to itself

_OURS = {
    "model_path", "load_format", "skip_tokenizer_init", "incremental_streaming_output", "node_rank",
    "stream_interval", "weight_version", "custom_sigquit_handler", "custom_weight_loader",
    "sampling_backend",
}  # fmt: skip
_REFUSED = {
    "speculative_algorithm": "SGLang checks drafts without Tailrace's sampler, and on a CPU takes the "
    "likeliest token at any temperature",
    "enable_lora": "adapters are merged into the weights",
}


def check_arguments(config: InferenceConfig) -> None:
    """Raises `EngineRefusalError` for settings that SGLang cannot follow here."""
    if config.device == "cuda" and _on_cpu(config):
        raise EngineRefusalError("inference.device is 'cuda', but torch finds no CUDA device")
    for name in sorted(config.engine_args.keys() & (_OURS | _REFUSED.keys())):
        reason = _REFUSED.get(name, "Tailrace sets it")
        raise EngineRefusalError(f"inference.engine_args.{name}: {reason}: remove it")


def server_arguments(
    config: InferenceConfig, folder: Path, max_len: int, dtype: torch.dtype
) -> dict[str, Any]:
    """`ServerArgs` of SGLang for settings that `check_arguments` took."""
    tensor, pipeline = config.parallel_sizes
    arguments: dict[str, Any] = {
        "tp_size": tensor,
        "pp_size": pipeline,
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "custom_sigquit_handler": on_child_error,
        "custom_weight_loader": [LOADER],
        "sampling_backend": "pytorch",  # that of `run_scheduler`
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": max_len + _SPARE_TOKENS,
        "max_running_requests": config.max_running,
        "chunked_prefill_size": config.max_batched_tokens,
        "disable_radix_cache": not config.prefix_cache,
        "page_size": config.kv_block_tokens,
        "random_seed": secrets.randbits(31),
        "log_level": "error",
        "sleep_on_idle": True,
    }
    if config.kv_on_update == "keep":  # a batch in flight would be of neither version
        arguments["disable_overlap_schedule"] = True
    if config.gpu_memory_utilization:
        arguments["mem_fraction_static"] = config.gpu_memory_utilization
    else:
        room = config.kv_cache_tokens + _SPARE_TOKENS + config.kv_block_tokens
        arguments["max_total_tokens"] = room
    if _on_cpu(config):
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "page_size": 1,
        }
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.num_threads)}
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return arguments | config.engine_args


def model_folder(card: ModelCard, config: InferenceConfig, folder: Path) -> torch.dtype:
    """Writes the model's configuration for SGLang; returns the type of its weights."""
    content = write_model_folder(card, folder)
    # The end of sequence is no stop by itself: requests name their stop ids.
    (folder / "config.json").write_text(json.dumps(content | {"eos_token_id": None}))
    named = "float32" if _on_cpu(config) else named_dtype(content)
    dtype: torch.dtype = getattr(torch, named if config.dtype == "auto" else config.dtype)
    return dtype


def usable_tokens(config: InferenceConfig, num_tokens: int) -> int:
    """Tokens for calls of a cache of `num_tokens`, without those that SGLang keeps to itself."""
    usable = num_tokens - _SPARE_TOKENS
    return usable if config.gpu_memory_utilization else min(usable, config.kv_cache_tokens)


def host_cache_tokens(
    card: ModelCard, config: InferenceConfig, dtype: torch.dtype, capacity_tokens: int
) -> int:
    """Tokens of SGLang's hierarchical cache in host memory; 0 without one.

    `capacity_tokens`: of the cache on the device.
    """
    given = config.engine_args
    if not given.get("enable_hierarchical_cache"):
        return 0
    size_gb = float(given.get("hicache_size", 0))
    if size_gb > 0:
        return int(size_gb * 1e9 // token_bytes(json.loads(card.config_json), dtype.itemsize))
    return int(float(given.get("hicache_ratio") or _HICACHE_RATIO) * capacity_tokens)


def _on_cpu(config: InferenceConfig) -> bool:
    return config.device == "cpu" or not torch.cuda.is_available()
