"""Settings of `inference` as arguments of vLLM."""

import os
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from tailrace_inference.adapters.node_link import Node, Welcome
from tailrace_inference.adapters.staging import named_dtype, token_bytes
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineRefusalError

_WORKER = "tailrace_inference.adapters.vllm_worker.WeightLoader"
_SCHEDULER = "tailrace_inference.adapters.vllm_guides.make_scheduler"
_OWN_ARGS = (
    "model", "load_format", "logprobs_mode", "worker_extension_cls", "scheduler_cls",
    "skip_tokenizer_init", "nnodes", "node_rank", "master_addr", "master_port",
)  # fmt: skip
_MOST_BYTES = 4  # of one number in the cache
_CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants multiples of it
# Free share of a device that vLLM asks for at its start, though the size of the cache is given; its own
# default of 0.92 would refuse a device that a learner or a second server uses too.
_LEAST_SHARE = 0.01


def check_engine_args(given: dict[str, Any]) -> None:
    """Raises `EngineRefusalError` for arguments that would break what Tailrace relies on."""
    if own := sorted(set(_OWN_ARGS) & given.keys()):
        raise EngineRefusalError(f"inference.engine_args.{own[0]} is set by Tailrace: remove it")
    speculation = given.get("speculative_config")
    if speculation is not None and speculation.get("method") != "ngram":
        raise EngineRefusalError(
            f"inference.engine_args.speculative_config: method {speculation.get('method')!r}, whose "
            "draft model would be neither loaded nor updated: use ngram"
        )


def engine_arguments(
    config: InferenceConfig,
    folder: str,
    content: dict[str, Any],
    *,
    max_len: int,
    max_logprobs: int,
    sleeps: bool,
    node: Node,
    welcome: Welcome,
) -> AsyncEngineArgs:
    """Returns the arguments; `content`: the model's configuration, which `folder` holds;
    `welcome`: the seed, and the port where the ranks of several nodes meet.

    It also sets the variables of the environment that vLLM reads at its start.
    """
    device = current_platform.device_type
    if config.device not in ("auto", device):
        raise EngineRefusalError(
            f"inference.device is {config.device!r}, and this build of vLLM runs on {device}: set "
            "it to auto, or install another build"
        )
    given = {
        "dtype": _dtype(config, content, device),
        "max_model_len": max_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.max_batched_tokens,
        "enable_prefix_caching": config.prefix_cache,
        "enforce_eager": device == "cpu",
        "seed": welcome.seed,
        "max_logprobs": max_logprobs,
        "disable_log_stats": True,
        "language_model_only": True,  # else models that also see need their processor
        "enable_sleep_mode": sleeps and device != "cpu",
        **_cache(config, content, device, max_len),
    }
    if device == "cpu":
        # A prompt in pieces sets a generator back, which torch cannot on the CPU.
        given["enable_chunked_prefill"] = False
        given["max_num_batched_tokens"] = max(config.max_batched_tokens, max_len)
    tensor, pipeline = config.parallel_sizes
    given |= {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    if node.num > 1:
        given |= _nodes(node, welcome)
    given |= config.engine_args
    if config.gpus_per_server == 1:
        given.setdefault("distributed_executor_backend", "uni")
    _set_environment(config, device)
    try:
        return AsyncEngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            logprobs_mode="raw_logprobs",
            worker_extension_cls=_WORKER,
            scheduler_cls=_SCHEDULER,
            **given,
        )
    except TypeError as error:  # an argument that vLLM does not know
        raise EngineRefusalError(f"inference.engine_args: {error}") from error


def _dtype(config: InferenceConfig, content: dict[str, Any], device: str) -> str:
    """Type of the weights; vLLM's own `auto` makes bfloat16 of a float32 model."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else named_dtype(content)


def _set_environment(config: InferenceConfig, device: str) -> None:
    if device == "cpu":
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # the first call would wait for a compiler
        torch.set_num_threads(config.num_threads)
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)  # of the process of the engine core
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # its sampler is not the one that is extended
    if config.gpus_per_server == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second process


def _nodes(node: Node, welcome: Welcome) -> dict[str, Any]:
    """Arguments of one of several nodes."""
    own_host = os.environ.get("TAILRACE_ADVERTISE_HOST", node.host if node.is_local else "")
    if own_host:  # where the other nodes reach the queues of this one
        os.environ.setdefault("VLLM_HOST_IP", own_host)
    # A forked worker would hold the connections of this process open after its death.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return {
        "distributed_executor_backend": "mp",
        "nnodes": node.num,
        "node_rank": node.rank,
        "master_addr": node.host,
        "master_port": welcome.port,
    }


def _cache(
    config: InferenceConfig, content: dict[str, Any], device: str, max_len: int
) -> dict[str, Any]:
    """Size of the cache of keys and values."""
    block = config.kv_block_tokens
    if device == "cpu":
        block = -(-block // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    if config.gpu_memory_utilization:
        return {"block_size": block, "gpu_memory_utilization": config.gpu_memory_utilization}
    num_tokens = max(config.kv_cache_tokens, max_len) + 2 * block
    sizes = {
        "block_size": block,
        "num_gpu_blocks_override": num_tokens // block,
        "kv_cache_memory_bytes": num_tokens * token_bytes(content, _MOST_BYTES),
    }
    return sizes if device == "cpu" else sizes | {"gpu_memory_utilization": _LEAST_SHARE}
