"""Size of the KV cache in tokens (pure).

With `gpu_memory_utilization` the cache gets a share of the device's memory, less weights and
activations. Weights count twice, since a new version is staged beside the active one, and a third time
where adapters are merged, since their base is kept; activations are an upper estimate.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.kv_cache import KVShape
from tailrace_inference.ports import EngineRefusalError

_LOGIT_BYTES = 16  # float32 logits, their sorted copy, probabilities and their sums
_LAYER_WIDTHS = 12  # hidden states that one layer holds at a time


class Sizes(NamedTuple):
    """Sizes of the memory's users, in bytes unless noted."""

    weights: int
    element: int  # of an activation, a key or a value
    hidden_size: int  # elements
    vocab_size: int  # elements
    merges_adapters: bool = False  # into a base that is held beside the active and the staged weights


class DeviceError(EngineRefusalError):
    """The configured device is missing or has no room."""


class NoCacheError(DeviceError):
    """The device has no memory for the cache. Attribute: `num_tokens`."""

    def __init__(self, num_tokens: int, reason: str) -> None:
        first = reason.partition("\n")[0]
        super().__init__(
            f"there is no memory for the keys and values of {num_tokens} tokens: lower "
            f"inference.kv_cache_tokens or gpu_memory_utilization ({first})"
        )
        self.num_tokens = num_tokens


class NoRoomError(ValueError):
    """The memory share is too small for a cache. Attributes: `room_bytes`, `needed_bytes`."""

    def __init__(self, room_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"inference.gpu_memory_utilization leaves {room_bytes >> 20} MiB for keys and values, and "
            f"max_running requests need {needed_bytes >> 20} MiB: raise it or lower max_running"
        )
        self.room_bytes = room_bytes
        self.needed_bytes = needed_bytes


def cache_tokens(
    config: InferenceConfig, layers: Sequence[KVShape], sizes: Sizes, total_bytes: int, free_bytes: int
) -> int:
    """Number of tokens that fit into the cache; raises `NoRoomError`.

    `free_bytes` of the device's `total_bytes` are free with one set of weights loaded.
    """
    if not config.gpu_memory_utilization:
        return config.kv_cache_tokens
    activations = config.max_running * sizes.vocab_size * _LOGIT_BYTES
    activations += config.max_batched_tokens * sizes.hidden_size * _LAYER_WIDTHS * sizes.element
    share = int(config.gpu_memory_utilization * total_bytes)
    beside = (2 if sizes.merges_adapters else 1) * sizes.weights  # the active ones are loaded
    room = min(share - sizes.weights - beside - activations, free_bytes - beside - activations)
    token = sum(each.num_heads * (each.key_dim + each.value_dim) for each in layers) * sizes.element
    least = config.max_running * config.kv_block_tokens
    if room < least * token:
        raise NoRoomError(max(room, 0), least * token)
    return room // token // config.kv_block_tokens * config.kv_block_tokens
