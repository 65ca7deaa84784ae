"""Models and optimizers of the `learner` section, whatever their role."""

import math
from typing import Any, Literal

import msgspec

from tailrace.config import Config

OF_OPTIMIZER = ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm")


def check_not_negative(config: Config, section: str, keys: tuple[str, ...]) -> None:
    """Raises `ValueError` for a key of `section` that is below 0, infinite or no number."""
    for key in keys:
        value = getattr(config, key)
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{section}.{key} must be a number from 0 on, found {value:g}")


def check_finite(config: Config, section: str = "", unbounded: frozenset[str] = frozenset()) -> None:
    """Raises `ValueError` for an infinite number, unless `unbounded` allows it above, and for nan."""
    for key in config.__struct_fields__:
        value = getattr(config, key)
        if not isinstance(value, float) or math.isfinite(value):
            continue
        if value != math.inf or key not in unbounded:
            name = f"{section}.{key}" if section else key
            raise ValueError(f"{name} must be a finite number, found {value:g}: give one")


class FromScratch(Config, frozen=True, kw_only=True):
    """A model with random weights, for when `pretrain` is empty."""

    model_type: str
    """Architecture by its Hugging Face name: `qwen3`, `llama`, ..."""

    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of the architecture's Hugging Face configuration. `vocab_size` and the ids of special tokens
    come from the tokenizer and need not be given."""

    tokenizer: str
    """`package.module:function`, called with a directory into which it writes a tokenizer's files."""

    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        check_not_negative(self, "from_scratch", ("init_std",))


class ModelArgs(Config, frozen=True, kw_only=True):
    """Computation of the model."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and of published weights. Master weights, gradients and optimizer state are
    float32 either way."""

    attn_implementation: Literal[
        "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = "packed"
    """`packed` computes each row of a packed batch by itself, and common prefixes once with
    `share_prefixes`; it works everywhere. The others are Hugging Face's own; `sdpa` and `eager` need
    memory quadratic in the tokens of a micro-batch."""

    forward: Literal["auto", "packed", "rows"] = "auto"
    """Way of rows through the model. `auto`: the fastest one that gives the plain model's results, as a
    check at load finds: packed rows with shared prefixes, packed rows, or each row by itself, which is
    slower and right for all (`docs/models.md`). `packed` refuses a model whose packed rows are wrong.
    `rows`: each row by itself."""

    disable_gradient_checkpointing: bool = True
    """false: keep no activations inside layers and compute them again in the backward pass, for long
    rows."""


class TrainingArgs(Config, frozen=True, kw_only=True):
    """The optimizer and its schedule over learner steps."""

    optimizer: str = "adamw"
    """`adamw`, `sgd` (`momentum` 0.9, `nesterov`), or an `Optimizer` of your own as `module:name`."""

    optimizer_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of the optimizer's function."""

    learning_rate: float = 1e-6
    """Peak learning rate, reached after `warmup_steps`."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the rate between the warm-up and `max_steps`."""

    warmup_steps: int = 0
    """Learner steps over which the rate rises linearly from 0."""

    min_lr_ratio: float = 0.0
    """Share of the peak rate that remains at `max_steps`, with `linear` and `cosine`."""

    weight_decay: float = 0.0
    """Decay of matrices; biases and norms do not decay."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.95
    """Decay of the second moment."""

    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""

    max_grad_norm: float = 1.0
    """Gradients of an update are scaled down to this global norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        check_not_negative(self, "training_args", OF_OPTIMIZER)
        for key in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"training_args.{key} must be from 0 to below 1")
        if not (self.adam_epsilon > 0 and math.isfinite(self.adam_epsilon)):
            raise ValueError("training_args.adam_epsilon must be positive: it keeps steps finite")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("training_args.min_lr_ratio must be 0 to 1, a share of learning_rate")
