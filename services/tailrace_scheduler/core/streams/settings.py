"""Numbers that the rules use: the engine model and the bounds of a run."""

import sys
from typing import Literal

from msgspec import Struct

StalePolicy = Literal["mask", "drop", "wait", "close", "auto"]


class EngineModel(Struct, frozen=True, kw_only=True):
    """Cost of one inference server. A decode step takes `a_s + c_s * batch + d_s * kv_tokens` seconds.

    The defaults stand for a model of 7 to 8 billion parameters on one 80 GB GPU. Reports of the servers
    replace K, R and the host memory, and their measured step times scale the costs.
    """

    a_s: float = 7.5e-3  # of every step
    c_s: float = 10e-6  # for each request of the batch
    d_s: float = 40e-9  # for each token of KV that the step reads
    e_s: float = 40e-6  # to prefill a token; decoding stalls meanwhile
    restore_s: float = 5e-6  # to restore a token of KV from host memory
    kv_tokens: int = 500_000  # K
    max_running: int = 256  # R
    host_kv_tokens: int = 0  # KV kept in host memory when it leaves the GPU

    def step_s(self, batch: float, kv: float) -> float:
        """Return the seconds of a decode step with `batch` requests that hold `kv` tokens."""
        return self.a_s + self.c_s * batch + self.d_s * kv

    def useful_s(self, batch: float, kv: float) -> float:
        """Return the seconds of that step that a full server would need for the same tokens."""
        full = max(kv / self.kv_tokens, batch / self.max_running)
        return self.c_s * batch + self.d_s * kv + self.a_s * min(full, 1.0)

    def work_s(self, prefilled: float, sampled: float, context_sum: float) -> float:
        """Return the work bound W of tokens: the least engine seconds that any schedule needs for them.

        `context_sum` is the sum of the context lengths over the sampled tokens.
        """
        steps = max(context_sum / self.kv_tokens, sampled / self.max_running)
        return self.e_s * prefilled + self.c_s * sampled + self.d_s * context_sum + self.a_s * steps


class StreamSettings(Struct, frozen=True, kw_only=True):
    """Bounds of one run."""

    max_staleness: int
    groups_per_step: int
    max_steps: int = sys.maxsize
    policy: StalePolicy = "auto"
    context_limit: int = 32_768  # tokens of the longest episode; expected lengths start from it
    max_waste: float = 0.05  # share of tokens that closing may throw away
    max_buffered_groups: int = 0  # 0: no bound
    max_buffered_bytes: int = 1 << 62
    group_bytes: float = 0.0  # expected size of a group; 0: not known before the first one closes
    engine: EngineModel = EngineModel()
