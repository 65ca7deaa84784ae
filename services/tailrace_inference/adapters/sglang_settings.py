"""The model and the settings, as SGLang reads them."""

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_inference.adapters.sglang_thread import on_child_error
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineRefusalError
from tailrace_protos.weights import ModelCard

_SPARE_TOKENS = 8  # SGLang keeps a few tokens of each limit to itself

_OURS = {
    "model_path", "load_format", "skip_tokenizer_init", "incremental_streaming_output", "node_rank",
    "stream_interval", "weight_version", "custom_sigquit_handler",
}  # fmt: skip
_REFUSED = {
    "dp_size": "start one server for each data-parallel group: set inference.num_servers",
    "speculative_algorithm": "log-probabilities of speculated tokens are not those of the policy",
    "enable_lora": "adapters are merged into the weights",
}


def server_arguments(
    config: InferenceConfig, folder: Path, max_len: int, dtype: torch.dtype
) -> dict[str, Any]:
    """`ServerArgs` of SGLang for our settings; raises `EngineRefusalError`."""
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.device == "cuda" and on_cpu:
        raise EngineRefusalError("inference.device is 'cuda', but torch finds no CUDA device")
    for name in sorted(config.engine_args.keys() & (_OURS | _REFUSED.keys())):
        reason = _REFUSED.get(name, "Tailrace sets it")
        raise EngineRefusalError(f"inference.engine_args.{name}: {reason}: remove it")
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "custom_sigquit_handler": on_child_error,
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
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "page_size": 1,
        }
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.num_threads)}
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return arguments | config.engine_args


def model_skeleton(card: ModelCard, config: InferenceConfig, folder: Path) -> Any:
    """The model without memory for its weights, and its `config.json` in `folder` for SGLang."""
    content = json.loads(card.config_json)
    (folder / "config.json").write_bytes(card.config_json)
    try:
        with foreign_code("transformers"):
            hf_config: Any = AutoConfig.from_pretrained(folder)
            named = "float32" if config.device == "cpu" or not torch.cuda.is_available() else None
            dtype = config.dtype if config.dtype != "auto" else named or hf_config.dtype or "bfloat16"
            make: Any = AutoModelForCausalLM.from_config
            with torch.device("meta"):
                model = make(hf_config, dtype=getattr(torch, str(dtype).removeprefix("torch.")))
    except ForeignCodeError as error:
        raise EngineRefusalError(str(error)) from error
    for name, value in model.named_parameters():
        if value.ndim > 2 and math.prod(value.shape):
            raise EngineRefusalError(
                f"inference.engine: sglang loads {name!r} in another layout than that of transformers: "
                f"take torch for {content.get('model_type')}"
            )
    # The end of sequence is no stop by itself: requests name their stop ids.
    content |= {"eos_token_id": None, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(content))
    return model
