"""Configuration of the inference service: the `inference` section of an experiment file."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config
from tailrace.processor import CpuMatmul

Transport = Literal["nats", "zmq"]


class InferenceConfig(Config, frozen=True, kw_only=True):
    """One inference server: one engine on one device. Every replica gets the same section."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; `auto` takes the CUDA device if torch sees one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` is float32 on the CPU, and what the model's own
    `config.json` names on CUDA. Log-probabilities are float32 always."""

    num_threads: int = 1
    """Threads that torch may use on the CPU. More than one only pays where cores are idle."""

    cpu_matmul: CpuMatmul = "auto"
    """Library that multiplies float32 matrices on the CPU: torch's default (`torch`: MKL on x86) or
    `onednn`. `auto` takes oneDNN on every processor but Intel's, where the default is faster."""

    max_running: int = 256
    """Requests batched at once; the others wait."""

    max_waiting: int = 8192
    """Requests that may wait; one more is refused as overloaded."""

    max_batched_tokens: int = 2048
    """Tokens computed in one step: prompts are prefilled in chunks of what decoding leaves of it."""

    kv_cache_tokens: int = 65536
    """Tokens whose keys and values fit into the cache, running and kept prefixes together."""

    gpu_memory_utilization: float = 0.0
    """On CUDA: the share of the device's memory that weights, activations and cache may take together.
    The cache then holds what fits, and `kv_cache_tokens` is not read. 0: `kv_cache_tokens` counts."""

    kv_block_tokens: int = 16
    """Tokens of one cache block, the unit of allocation."""

    max_model_len: int = 0
    """Longest prompt and answer of one request together; 0: what the model's configuration says.
    Never more than the cache holds."""

    prefix_cache: bool = True
    """Keep an episode's keys and values after a turn until its next turn, or until room is needed, and
    compute a prompt that several calls have at once, as those of a group do, only once."""

    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What a weight update does to keys and values of the old version: `recompute` computes them
    again with the new weights, so that every log-probability is exactly its version's; `keep` goes on
    with them, which saves that work and biases log-probabilities (`stale_kv_tokens_total` counts)."""

    forward: Literal["auto", "generic"] = "auto"
    """`auto` runs Llama-like decoders through the Llama forward when it agrees with the model's own at
    load; `generic` always runs the Hugging Face modules."""

    step_in: Literal["auto", "loop", "thread"] = "auto"
    """Where steps run: in the event loop between two I/O ticks, or in a worker thread. `auto` is the
    loop for small models on the CPU, whose steps take milliseconds, and a thread for all others."""

    stream_interval_ms: float = 20.0
    """Sampled tokens leave the server at the latest after this time."""

    stream_chunk_tokens: int = 32
    """Sampled tokens of one call leave the server at the latest when there are so many."""

    transports: tuple[Transport, ...] = ("nats", "zmq")
    """Ways in for generation requests. Callers choose among those a server announces."""

    bind_host: str = ""
    """Address that ZMQ callers connect to (0.0.0.0: all interfaces). Empty: a socket in the state
    directory, for callers of the same host. Anything but loopback switches encryption on."""

    advertise_host: str = ""
    """Name that other hosts reach `bind_host` by; empty: `bind_host`, or this host's name if that is
    0.0.0.0."""

    heartbeat_s: float = 0.5
    """Time between two entries in the server registry."""

    drain_s: float = 20.0
    """At SIGTERM running calls get so long to finish; the rest are aborted with what they have."""

    emission_log: bool = False
    """Append every emitted chunk to `<run_dir>/emissions-<server_id>.bin` for fidelity audits."""

    def __post_init__(self) -> None:
        for key in (
            "num_threads",
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
        self._check_cache()
        if self.heartbeat_s <= 0:
            raise ValueError("heartbeat_s must be positive")
        if not self.transports:
            raise ValueError("transports must name at least one of nats, zmq")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running "
                f"({self.max_running}): every running request decodes one token a step"
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
