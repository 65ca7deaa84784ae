"""Configuration of how the learner runs: ranks, and adapters instead of whole weights."""

from typing import Literal

from tailrace.config import Config
from tailrace_learner.config_models import check_finite


class StrategyArgs(Config, frozen=True, kw_only=True):
    """Spread of the model and its optimizer over the learner's ranks."""

    strategy_name: Literal["auto", "single", "fsdp2", "deepspeed", "megatron"] = "auto"
    """`single`: one process holds everything. `fsdp2`: PyTorch's fully sharded data parallel, weights,
    gradients and optimizer cut over the ranks, rows spread over them. `deepspeed`: ZeRO by the package
    of that name. `megatron`: every layer cut over `tensor_parallel_size` ranks by the linear layers of
    megatron-core, for `llama`, `mistral`, `qwen2` and `qwen3`. `auto`: `single` for one rank, `fsdp2`
    for more."""

    num_ranks: int = 1
    """Processes that compute a step together, started on this host; one GPU each, if there are any."""

    zero_stage: Literal[1, 2, 3] = 2
    """Parts that `deepspeed` cuts over the ranks: the optimizer's state (1), gradients too (2), weights
    too (3). `fsdp2` cuts all of them."""

    tensor_parallel_size: int = 1
    """Neighbouring ranks over which `megatron` cuts every layer. They compute the same rows together;
    rows are spread over the `num_ranks` / `tensor_parallel_size` groups. It must divide the model's
    heads, key-value heads and inner size."""

    timeout_s: float = 600.0
    """Time limit of waiting between ranks: inside a pass, or until a rank takes the next command of the
    first one. After it the learner restarts."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError("strategy_args.num_ranks must be at least 1")
        if self.strategy_name == "single" and self.num_ranks > 1:
            raise ValueError(
                "strategy_args.strategy_name single computes on one rank: use num_ranks 1 or fsdp2"
            )
        check_finite(self, "strategy_args")
        if self.timeout_s <= 0:
            raise ValueError("strategy_args.timeout_s must be positive")
        self._check_tensor_parallel()

    def _check_tensor_parallel(self) -> None:
        size = self.tensor_parallel_size
        if size < 1:
            raise ValueError("strategy_args.tensor_parallel_size must be at least 1")
        if size > 1 and self.strategy_name != "megatron":
            raise ValueError(
                f"strategy_args.tensor_parallel_size {size} is for strategy_name megatron, which alone "
                "cuts layers: name it, or leave tensor_parallel_size out"
            )
        if self.num_ranks % size:
            raise ValueError(
                f"strategy_args.num_ranks {self.num_ranks} is no multiple of tensor_parallel_size "
                f"{size}: use one"
            )

    @property
    def resolved_name(self) -> str:
        """Strategy that `auto` stands for."""
        if self.strategy_name != "auto":
            return self.strategy_name
        return "single" if self.num_ranks == 1 else "fsdp2"


class LoraArgs(Config, frozen=True, kw_only=True):
    """Low-rank adapters by `peft` (extra `lora`); the model's own weights stay as they are.

    Hu et al. 2021, "LoRA", arXiv:2106.09685: W + (alpha / r) B A. There is no dropout: training must
    compute what the engine sampled from.
    """

    r: int = 16
    """Rank of the adapters."""

    alpha: int = 32
    """Their scale is alpha / r."""

    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layers that get adapters, by the last part of their names; `all-linear`: every one."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError("lora.r must be at least 1")
        if self.alpha <= 0:
            raise ValueError("lora.alpha must be positive")
        if not self.target_modules:
            raise ValueError("lora.target_modules must name at least one layer, or all-linear")
