"""Configuration of the inference service: the `inference` section of an experiment file."""

from typing import Any, Literal, get_args

import msgspec

from tailrace.config import Config
from tailrace.processor import CpuMatmul

Transport = Literal["nats", "zmq"]
KvOnUpdate = Literal["recompute", "keep"]
WeightsDtype = Literal["published", "bfloat16", "float8_e4m3fn"]
WEIGHTS_DTYPES: tuple[WeightsDtype, ...] = get_args(WeightsDtype)


# Functions or classes that make an engine of a `ModelCard` and an `InferenceConfig`; imported when
# asked for, since each has packages of its own.
ENGINES = {
    "torch": "tailrace_inference.engine.driver:torch_engine",
    "vllm": "tailrace_inference.adapters.vllm_engine:VllmEngine",
    "sglang": "tailrace_inference.adapters.sglang_engine:SGLangEngine",
    "hf": "tailrace_inference.engine.hf_engine:hf_engine",
}

# Smallest temperatures above 0 that engines take: vLLM raises smaller ones, SGLang takes them as 0.
LEAST_TEMPERATURES = {"vllm": 0.01, "sglang": 1e-6}

# Names that tensor and pipeline parallelism have in `engine_args` of engines that know both, and that
# of data parallelism, which is several servers here.
PARALLEL_ARGS = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "sglang": ("tp_size", "pp_size", "dp_size"),
}


class InferenceConfig(Config, frozen=True, kw_only=True):
    """One inference server: one engine on one device. All replicas read the same section."""

    engine: str = "torch"
    """Engine that generates: `torch` (Tailrace's own), `vllm`, `sglang`, `hf` (plain transformers, the
    reference), or `module:Class` of yours (`docs/engines.md`). A setting that the engine cannot follow
    is refused at the start."""

    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments for the engine, under its own names. They win over those that follow from other
    keys; those that Tailrace must set are refused. `torch` takes none."""

    tensor_parallel_size: int = 1
    """GPUs over which the engine cuts every layer; `vllm` and `sglang` can. A server has this number of
    GPUs times `pipeline_parallel_size`; data parallelism is `cluster.num_inference_servers`."""

    pipeline_parallel_size: int = 1
    """Stages into which the engine divides the layers, each with GPUs of its own."""

    num_nodes: int = 1
    """Nodes over which a server's GPUs lie, in equal parts; `vllm` can. Above 1, a process of the
    service runs on each node, with `TAILRACE_NODE_RANK` and `TAILRACE_MASTER` (host:port of the first)
    in its environment: the first serves, the others only compute. The chart sets both
    (`docs/kubernetes.md`)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto` takes the CUDA device if torch finds one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto` is float32 on the CPU, and the type in the model's
    `config.json` on CUDA. Log-probabilities are always float32."""

    weights_dtype: WeightsDtype = "published"
    """Type in which weight_sync sends the weights; the engine widens them to `dtype`. `published` is
    that of the learner's parameters (`learner.model_args.dtype`). `bfloat16` halves float32 ones and
    makes differences between versions small. `float8_e4m3fn` also rounds the matrices of linear layers
    to 8 bits, with a scale for each block of 128 x 128: the policy that generates is the rounded one,
    and `mismatch_kl` contains the effect."""

    num_threads: int = 1
    """Threads that torch may use on the CPU. More than one helps only if cores are idle."""

    cpu_matmul: CpuMatmul = "auto"
    """Library that multiplies float32 matrices on the CPU: torch's default (`torch`: MKL on x86) or
    `onednn`. `auto` takes oneDNN on every processor but Intel's, where the default is faster."""

    max_running: int = 256
    """Requests in one batch; the others wait."""

    max_waiting: int = 8192
    """Requests that may wait; a further request is refused as overloaded."""

    max_batched_tokens: int = 2048
    """Tokens computed in one step: decoding first, then chunks of prompts."""

    kv_cache_tokens: int = 65536
    """Tokens whose keys and values fit into the cache, of running requests and kept prefixes."""

    gpu_memory_utilization: float = 0.0
    """On CUDA: share of the device's memory for weights, activations and cache together. The cache gets
    what is left of it, and `kv_cache_tokens` is not read. 0: `kv_cache_tokens` sets the size."""

    kv_block_tokens: int = 16
    """Tokens of one cache block. The cache is allocated in blocks."""

    max_model_len: int = 0
    """Most tokens of one request, prompt and answer together. 0: the limit of the model's
    configuration. The size of the cache is a further limit."""

    prefix_cache: bool = True
    """Keep an episode's keys and values after a turn for its next turn, as long as there is room; and
    compute a prompt that several calls share, as the calls of a group do, only once."""

    kv_on_update: KvOnUpdate = "recompute"
    """Effect of a weight update on cached keys and values. `recompute` computes them again with the
    new weights, so that each log-probability is exact for its version. `keep` uses the old ones, which
    saves work but biases log-probabilities (`stale_kv_tokens_total` counts these tokens)."""

    forward: Literal["auto", "generic", "rows"] = "auto"
    """`auto` takes the fastest forward whose logits are those of the plain model, as checks at load and
    on the first weights find: one for Llama-like decoders, the Hugging Face modules with paged keys and
    values, or the plain model one sequence at a time, which is slow and right for all
    (`docs/models.md`). `generic` leaves the first one out, `rows` the first two."""

    step_in: Literal["auto", "loop", "thread"] = "auto"
    """Place of the engine's steps: the event loop or a worker thread. `auto` takes the loop for small
    models on the CPU, whose steps take milliseconds, and a thread for all others."""

    stream_interval_ms: float = 20.0
    """Longest time that the server holds sampled tokens before it sends them. `vllm` counts tokens
    alone, at most four of a call."""

    stream_chunk_tokens: int = 32
    """Number of sampled tokens of one call that the server sends at once."""

    transports: tuple[Transport, ...] = ("nats", "zmq")
    """Transports for generation requests. Callers choose one of those that a server announces."""

    bind_host: str = ""
    """Address on which ZMQ callers connect, and servers that fetch weights from this one (0.0.0.0: all
    interfaces). Empty: a socket in the state directory for callers of the same host, and the loopback
    for its servers. Every address but loopback switches encryption on."""

    advertise_host: str = ""
    """Host name under which other hosts reach `bind_host`. Empty: `bind_host`, or this host's name if
    `bind_host` is 0.0.0.0."""

    heartbeat_s: float = 0.5
    """Seconds between two updates of the server registry."""

    drain_s: float = 20.0
    """Seconds for running calls after SIGTERM. Then they are aborted; callers keep their tokens."""

    emission_log: bool = False
    """Append every emitted chunk to `<run_dir>/emissions-<server_id>.bin` for fidelity audits."""

    def __post_init__(self) -> None:
        for key in (
            "num_threads",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "num_nodes",
            "max_running",
            "max_waiting",
            "kv_block_tokens",
            "stream_chunk_tokens",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("max_model_len", "stream_interval_ms", "drain_s"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if ":" not in self.engine and self.engine not in ENGINES:
            raise ValueError(
                f"engine is {self.engine!r}: take one of {', '.join(ENGINES)}, or module:Class"
            )
        self._check_cache()
        self._check_parallel()
        self._check_nodes()
        if self.heartbeat_s <= 0:
            raise ValueError("heartbeat_s must be positive")
        if not self.transports:
            raise ValueError("transports must name at least one of nats, zmq")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running "
                f"({self.max_running}): every running request decodes one token a step"
            )

    @property
    def parallel_sizes(self) -> tuple[int, int]:
        """Sizes of tensor and pipeline parallelism, whichever of their names gives them."""
        tensor, pipeline, _ = PARALLEL_ARGS.get(self.engine, ("", "", ""))
        args = self.engine_args
        return (
            args.get(tensor, self.tensor_parallel_size),
            args.get(pipeline, self.pipeline_parallel_size),
        )

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one server."""
        tensor, pipeline = self.parallel_sizes
        return tensor * pipeline

    def _check_nodes(self) -> None:
        if self.num_nodes == 1:
            return
        if self.engine != "vllm":
            raise ValueError(
                f"num_nodes is {self.num_nodes}: a server of the engine {self.engine} has one node: "
                "take vllm, or start more servers (cluster.num_inference_servers)"
            )
        if self.gpus_per_server % self.num_nodes:
            raise ValueError(
                f"num_nodes is {self.num_nodes}: tensor_parallel_size x pipeline_parallel_size is "
                f"{self.gpus_per_server}, of which nodes cannot have equal parts: make it a multiple"
            )

    def _check_parallel(self) -> None:
        names = PARALLEL_ARGS.get(self.engine)
        if names is None:
            if self.gpus_per_server > 1 and self.engine in ENGINES:
                raise ValueError(
                    f"the engine {self.engine} has one device, and tensor_parallel_size x "
                    f"pipeline_parallel_size is {self.gpus_per_server}: take vllm or sglang, or start "
                    "more servers (cluster.num_inference_servers)"
                )
            return
        for name, key in zip(names, ("tensor_parallel_size", "pipeline_parallel_size"), strict=False):
            given, ours = self.engine_args.get(name, 1), getattr(self, key)
            if type(given) is not int or given < 1:
                raise ValueError(f"engine_args.{name} must be a number from 1 on, found {given!r}")
            if name in self.engine_args and ours not in (1, given):
                raise ValueError(
                    f"{key} is {ours} and engine_args.{name} is {given}: they are the same setting: "
                    "remove one"
                )
        if self.engine_args.get(names[2], 1) != 1:
            raise ValueError(
                f"engine_args.{names[2]}: start one server for each data-parallel group: set "
                "cluster.num_inference_servers"
            )

    def _check_cache(self) -> None:
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise ValueError("gpu_memory_utilization must be a share, 0 to 1")
        if self.gpu_memory_utilization and self.device == "cpu":
            raise ValueError(
                "gpu_memory_utilization is read on CUDA only: remove it, or set device to auto or cuda"
            )
        if self.kv_cache_tokens < self.max_running * self.kv_block_tokens:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold a block for each of max_running "
                f"requests: raise it to {self.max_running * self.kv_block_tokens} or lower max_running"
            )
