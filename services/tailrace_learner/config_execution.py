"""Configuration of how the learner runs: ranks, adapters instead of whole weights, trackers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from tailrace.config import Config
from tailrace.config.suggestions import not_one_of
from tailrace_learner.config_models import check_numbers

_IN = "tailrace_learner.adapters.trackers"

TRACKERS: Mapping[str, str] = MappingProxyType(
    {
        "console": f"{_IN}.console:ConsoleTracker",
        "jsonl": f"{_IN}.jsonl:JsonLinesTracker",
        "mlflow": f"{_IN}.mlflow:MlflowTracker",
        "tensorboard": f"{_IN}.tensorboard:TensorboardTracker",
        "trackio": f"{_IN}.trackio:TrackioTracker",
        "wandb": f"{_IN}.wandb:WandbTracker",
    }
)
"""Class of each built-in tracker by its name in `learner.trackers`."""


_ZERO_STAGE: Literal[2] = 2


class StrategyArgs(Config, frozen=True, kw_only=True):
    """Spread of the model and its optimizer over the learner's ranks."""

    strategy_name: Literal["auto", "single", "fsdp2", "deepspeed", "megatron"] = "auto"
    """`single`: one process holds everything. `fsdp2`: PyTorch's fully sharded data parallel, weights,
    gradients and optimizer cut over the ranks, rows spread over them. `deepspeed`: ZeRO by the package
    of that name. `megatron`: every layer cut over `tensor_parallel_size` ranks by the linear layers of
    megatron-core, for `llama`, `mistral`, `qwen2` and `qwen3`. `auto`: `single` for one rank, `fsdp2`
    for more."""

    num_ranks: int = 1
    """Processes that compute a step together, one GPU each, if there are any. They start on this host,
    or in equal parts on the hosts of the chart's `learner.nodes`."""

    zero_stage: Literal[1, 2, 3] = _ZERO_STAGE
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
        check_numbers(
            self,
            "strategy_args",
            at_least_one="num_ranks tensor_parallel_size",
            positive="timeout_s",
        )
        if self.strategy_name == "single" and self.num_ranks > 1:
            raise ValueError(
                "strategy_args.strategy_name single computes on one rank: use num_ranks 1 or fsdp2"
            )
        if self.zero_stage != _ZERO_STAGE and self.strategy_name != "deepspeed":
            raise ValueError(
                f"strategy_args.zero_stage {self.zero_stage} is for strategy_name deepspeed, which "
                "alone has stages: name it, or leave zero_stage out"
            )
        size = self.tensor_parallel_size
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
    """Linear layers that get adapters, by the last part of their names; `all-linear`: every one that
    has a weight of its own."""

    def __post_init__(self) -> None:
        check_numbers(self, "lora", at_least_one="r", positive="alpha")
        if not self.target_modules:
            raise ValueError("lora.target_modules must name at least one layer, or all-linear")


class WandbArgs(Config, frozen=True, kw_only=True):
    """Metrics for Weights & Biases (extra `wandb`), under `<run_dir>/wandb/`."""

    project: str
    """Project of the run. The run has the experiment's name."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files only; `wandb sync` sends them later. `online` sends each row at once, with
    the key of `wandb login`."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("wandb.project must not be empty")


def chosen_trackers(
    trackers: Mapping[str, dict[str, Any]], tensorboard: bool, wandb: WandbArgs | None
) -> dict[str, dict[str, Any]]:
    """Arguments of every chosen tracker by name; `ValueError` for an unknown or repeated one."""
    for name in trackers:
        if name not in TRACKERS and ":" not in name:
            raise ValueError(f"trackers: {not_one_of(repr(name), TRACKERS)}; your own is module:name")
    chosen: dict[str, dict[str, Any]] = {"tensorboard": {}} if tensorboard else {}
    if wandb is not None:
        if "wandb" in trackers:
            raise ValueError("wandb and trackers.wandb are the same tracker: give one of them")
        chosen["wandb"] = {"project": wandb.project, "mode": wandb.mode}
    return chosen | dict(trackers)
