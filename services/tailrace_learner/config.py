"""Configuration of the learner: the `learner` section of an experiment file."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tailrace.config import Config, RunConfig
from tailrace_learner.config_algorithm import AlgorithmConfig


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


class ModelArgs(Config, frozen=True, kw_only=True):
    """How the model computes."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and of published weights. Master weights, gradients and optimizer state are
    float32 either way."""

    attn_implementation: Literal[
        "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = "packed"
    """`packed` computes each row of a packed batch by itself and works everywhere. The others are
    Hugging Face's own; `sdpa` and `eager` cost memory quadratic in the tokens of a micro-batch."""

    disable_gradient_checkpointing: bool = True
    """false: keep no activations inside layers but compute them again backward, for long rows."""


class TrainingArgs(Config, frozen=True, kw_only=True):
    """The optimizer, AdamW, and its schedule over learner steps."""

    learning_rate: float = 1e-6
    """Peak learning rate, reached after `warmup_steps`."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls between the warm-up and `max_steps`."""

    warmup_steps: int = 0
    """Learner steps over which the rate rises linearly from 0."""

    min_lr_ratio: float = 0.0
    """What is left of the peak rate at `max_steps`, with `linear` and `cosine`."""

    weight_decay: float = 0.0
    """Decay of matrices; biases and norms are left alone."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.95
    """Decay of the second moment."""

    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""

    max_grad_norm: float = 1.0
    """Gradients of an update are scaled down to this global norm; 0 switches clipping off."""


class WarmStart(Config, frozen=True, kw_only=True):
    """Supervised steps on demonstrations before version 0."""

    demonstrations: str
    """`package.module:function`, called as `f(renderer, seed=..., num_episodes=..., **options)`; yields
    `(token_ids, loss_mask)` rows, mask 1 on what the model shall learn to say."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments for `demonstrations`."""

    num_steps: int
    """Optimizer steps."""

    batch_size: int = 64
    """Rows of one step; none is seen twice."""

    learning_rate: float = 1e-3
    """Peak learning rate."""

    warmup_steps: int = 5
    """Steps over which the rate rises linearly from 0; then it falls as a cosine to a tenth."""

    weight_decay: float = 0.0
    """Decay of matrices."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""


class LearnerConfig(AlgorithmConfig, frozen=True, kw_only=True):
    """One learner process."""

    from_scratch: FromScratch | None = None
    """The model when the run's `pretrain` is empty; exactly one of the two must be given."""

    warm_start: WarmStart | None = None
    """Supervised steps before reinforcement learning; none by default."""

    model_args: ModelArgs = ModelArgs()
    """How the model computes."""

    training_args: TrainingArgs = TrainingArgs()
    """The optimizer and its schedule."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; `auto` takes the CUDA device if torch sees one."""

    num_threads: int = 1
    """Threads that torch may use on the CPU. More than one only pays where cores are idle."""

    stale_tokens: Literal["mask", "drop_group"] = "mask"
    """What becomes of tokens more than `max_staleness` steps old: they alone are not trained, or their
    whole group is given back and others are admitted for it."""

    temperature: float = 1.0
    """The temperature at which training episodes are sampled; log-probabilities are taken at it."""

    max_tokens_per_micro_batch: int = 4096
    """Tokens in one forward and backward pass: bounds memory, changes no result. A longer row goes
    alone."""

    min_tokens_per_micro_batch: int = 1024
    """Wait for so many tokens before a pass, unless the mini-batch is complete."""

    logprob_chunk_tokens: int = 1024
    """Sampled tokens whose logits are in memory at once."""

    save_total_limit: int = 0
    """Keep so many of this lineage's newest checkpoints; 0 keeps all. The newest is never removed."""

    max_retained_bytes: int = 1 << 30
    """When trained groups that no checkpoint holds reach this size, checkpoint without waiting for
    `save_steps`."""

    save_trajectories: bool = False
    """Append every trained group to `<run_dir>/trajectories/`, for audits and replay."""

    tensorboard: bool = True
    """Write metrics to `<run_dir>/tensorboard/` as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("num_threads", "max_tokens_per_micro_batch", "logprob_chunk_tokens")
        for key in (*positive, "max_retained_bytes"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if self.temperature <= 0:
            raise ValueError("temperature must be positive")
        for key in ("min_tokens_per_micro_batch", "save_total_limit"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if self.min_tokens_per_micro_batch > self.max_tokens_per_micro_batch:
            raise ValueError("min_tokens_per_micro_batch must not exceed max_tokens_per_micro_batch")


def check_with_run(config: LearnerConfig, run: RunConfig) -> None:
    """Raise `ValueError` for settings that are possible alone but not together with the run's."""
    if bool(run.pretrain) == (config.from_scratch is not None):
        raise ValueError(
            "give either pretrain (a model to start from) or learner.from_scratch (a new one), not "
            f"{'both: learner.from_scratch=null drops the latter' if run.pretrain else 'neither'}"
        )
    if config.num_mini_batches > run.groups_per_step:
        raise ValueError(
            f"learner.num_mini_batches ({config.num_mini_batches}) must not exceed groups_per_step "
            f"({run.groups_per_step}): every mini-batch needs a group"
        )
    if run.group_size < 2 and config.needs_two_members:
        raise ValueError(
            f"group_size {run.group_size} with adv_estimator {config.adv_estimator!r}: it compares the "
            "members of a group with each other; use at least 2"
        )
