"""Models of the `learner` section (policy, reference, critic) and their optimizers."""

import math
from typing import Any, Literal

import msgspec

from tailrace.config import Config

OF_OPTIMIZER = "learning_rate warmup_steps weight_decay max_grad_norm"


def check_numbers(
    config: Config,
    section: str = "",
    *,
    unbounded: str = "",
    at_least_one: str = "",
    positive: str = "",
    not_negative: str = "",
    shares: str = "",
) -> None:
    """Raises `ValueError` for a number outside of its range; each range lists its keys.

    Numbers are finite, except for `unbounded` ones: for them `.inf` means that there is no bound.
    """
    prefix = f"{section}." if section else ""
    _check_finite(config, prefix, unbounded.split())
    for keys, least, most, wanted in (
        (at_least_one, 1, math.inf, "be at least 1"),
        (positive, math.ulp(0.0), math.inf, "be positive"),
        (not_negative, 0, math.inf, "not be negative"),
        (shares, 0, 1, "lie between 0 and 1"),
    ):
        for key in keys.split():
            value = getattr(config, key)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{prefix}{key} must {wanted}, found {value:g}")


def _check_finite(config: Config, prefix: str, unbounded: list[str]) -> None:
    for key in config.__struct_fields__:
        value = getattr(config, key)
        is_bound = value == math.inf and key in unbounded
        if isinstance(value, float) and not (is_bound or math.isfinite(value)):
            raise ValueError(f"{prefix}{key} must be a finite number, found {value:g}: give one")


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
        check_numbers(self, "from_scratch", not_negative="init_std")


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
        check_numbers(
            self,
            "training_args",
            not_negative=OF_OPTIMIZER,
            positive="adam_epsilon",
            shares="min_lr_ratio adam_beta1 adam_beta2",
        )
        for key in ("adam_beta1", "adam_beta2"):
            if getattr(self, key) == 1:
                raise ValueError(f"training_args.{key} must be below 1")


class ReferenceArgs(Config, frozen=True, kw_only=True):
    """Frozen model that the policy is held near to, while `init_kl_coef` is not 0."""

    pretrain: str = ""
    """Directory (or hub name) of its weights. Empty: the weights at the run's start, also after a
    resume. A teacher may be larger than the policy, and must have the policy's tokens under the same
    ids and vectors for as many."""

    offload: bool = False
    """Keep its weights in host memory and bring them to the device for each pass: slower, but the
    device holds one model less in between. On the CPU it changes nothing."""

    sharded: bool = False
    """Cut its weights over the learner's ranks, as `strategy_name: fsdp2` cuts the policy's, and
    gather them layer by layer for each pass: each of n ranks holds one n-th. false: every rank holds
    all of it, with `model_args.dtype: bfloat16` the weights of linear layers in that type. In both
    cases it runs in the learner's processes, on their devices."""

    def __post_init__(self) -> None:
        if self.sharded and self.offload:
            raise ValueError(
                "reference.offload moves a reference that every rank holds whole, reference.sharded "
                "cuts it: give one"
            )


class CriticArgs(Config, frozen=True, kw_only=True):
    """Model of values: a trunk and a linear head, which begins at 0."""

    pretrain: str = ""
    """Directory (or hub name) of a model of the policy's vocabulary to start from. Empty: a copy of the
    policy at the run's start."""

    shared: bool = False
    """true: the critic has no trunk; its head reads the policy's hidden states."""

    value_loss_coef: float = 0.1
    """With `shared`: weight of the value loss in the gradient of the policy's trunk; 0 lets the head
    alone learn from it."""

    training_args: TrainingArgs = TrainingArgs(learning_rate=1e-5)
    """The critic's optimizer and its schedule; with `shared`, the head's."""

    value_clip: float = 0.2
    """Distance from the values at the step's start at which values are clipped; 0 switches it off."""

    critic_warmup: int = 0
    """Learner steps at the beginning in which the critic alone is trained."""

    def __post_init__(self) -> None:
        check_numbers(self, "critic", not_negative="value_clip critic_warmup value_loss_coef")
        if self.shared and self.pretrain:
            raise ValueError(
                "critic.pretrain names a model of its own, critic.shared says there is none: give one"
            )
        if not self.shared and self.value_loss_coef != 0.1:
            raise ValueError("critic.value_loss_coef is read with critic.shared only: remove it")
