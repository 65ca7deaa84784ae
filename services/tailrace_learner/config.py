"""Configuration of the learner: the `learner` section of an experiment file."""

from typing import Any, Literal

import msgspec

from tailrace.config import Config, RunConfig
from tailrace.object_store import is_url
from tailrace.processor import CpuMatmul
from tailrace_learner.config_algorithm import AlgorithmConfig
from tailrace_learner.config_checks import (
    check_algorithm,
    check_metrics,
    check_optimizer,
    check_roles,
)
from tailrace_learner.config_execution import LoraArgs, StrategyArgs, WandbArgs, chosen_trackers
from tailrace_learner.config_models import (
    OF_OPTIMIZER,
    CriticArgs,
    FromScratch,
    ModelArgs,
    ReferenceArgs,
    TrainingArgs,
    check_numbers,
)

__all__ = [
    "CriticArgs",
    "FromScratch",
    "LearnerConfig",
    "LoraArgs",
    "ModelArgs",
    "ReferenceArgs",
    "StrategyArgs",
    "TrainingArgs",
    "WandbArgs",
    "WarmStart",
    "check_with_run",
]


class WarmStart(Config, frozen=True, kw_only=True):
    """Supervised steps on demonstrations before version 0."""

    demonstrations: str
    """`package.module:function`, called as `f(renderer, seed=..., num_episodes=..., **options)`; yields
    rows `(token_ids, loss_mask)` with mask 1 on the tokens that the model learns to produce."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments for `demonstrations`."""

    num_steps: int
    """Optimizer steps."""

    batch_size: int = 64
    """Rows of one step; no row is used twice."""

    learning_rate: float = 1e-3
    """Peak learning rate."""

    warmup_steps: int = 5
    """Steps over which the rate rises linearly from 0; then it falls as a cosine to a tenth."""

    weight_decay: float = 0.0
    """Decay of matrices."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""

    @property
    def training_args(self) -> TrainingArgs:
        """The optimizer and its schedule."""
        return TrainingArgs(
            learning_rate=self.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=self.warmup_steps,
            min_lr_ratio=0.1,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def __post_init__(self) -> None:
        check_numbers(self, "warm_start", not_negative=OF_OPTIMIZER)
        for key in ("num_steps", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"warm_start.{key} must be at least 1; no warm_start is none")


class LearnerConfig(AlgorithmConfig, frozen=True, kw_only=True):
    """All keys of the learner, whatever its number of processes."""

    from_scratch: FromScratch | None = None
    """The model when the run's `pretrain` is empty; exactly one of the two must be given."""

    warm_start: WarmStart | None = None
    """Supervised steps before reinforcement learning; none by default."""

    model_args: ModelArgs = ModelArgs()
    """Computation of the model."""

    training_args: TrainingArgs = TrainingArgs()
    """The optimizer and its schedule."""

    reference: ReferenceArgs | None = None
    """Model that the divergence is measured from (`init_kl_coef`); without it, the weights at the run's
    start."""

    critic: CriticArgs | None = None
    """Model of values, for `adv_estimator: gae`."""

    strategy_args: StrategyArgs = StrategyArgs()
    """Number of ranks, and the spread of model and optimizer over them."""

    lora: LoraArgs | None = None
    """Train low-rank adapters instead of the model's own weights, in the warm start too; only adapters
    travel to the engines after the first version."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` takes the CUDA device if torch sees one."""

    bind_host: str = "127.0.0.1"
    """Address on which a weight_sync of another host fetches new weights (0.0.0.0: all interfaces).
    Every address but loopback switches encryption on."""

    drain_s: float = 20.0
    """Seconds after SIGTERM or Ctrl-C to end the computation in progress and to save a checkpoint. Then
    the process ends without one. A publication of weights has a tenth of it; servers get the version of
    the next learner otherwise."""

    checkpoint_url: str = ""
    """URL of an object store (`s3://bucket/runs`) that gets a copy of every checkpoint, in
    `<checkpoint_url>/<exp_name>/step_<N>/`. Groups are released once the copy is complete. A learner
    whose run directory is lost continues from it. A reference with the weights of the run's start is
    beside it, in `start_<digest>/`. Empty: none. `s3://` needs the extra `s3`."""

    num_threads: int = 1
    """Threads that torch may use on the CPU. More than one helps only where cores are idle."""

    cpu_matmul: CpuMatmul = "auto"
    """Library that multiplies float32 matrices on the CPU: torch's default (`torch`: MKL on x86) or
    `onednn`. `auto` takes oneDNN on every processor but Intel's, where the default is faster."""

    temperature: float = 1.0
    """Temperature at which training episodes are sampled, and of the learner's log-probabilities."""

    max_tokens_per_micro_batch: int = 4096
    """Tokens in one forward and backward pass, shared ones counted once. It bounds memory and
    changes no result. A longer row goes alone."""

    share_prefixes: bool = True
    """Compute a common prefix of rows of a pass once: the prompt of a group, the history of an
    episode's turns. It changes the cost and no result. It needs
    `model_args.attn_implementation: packed`; other implementations ignore it."""

    min_tokens_per_micro_batch: int = 1024
    """Tokens to wait for before a pass, unless the mini-batch is complete."""

    logprob_chunk_tokens: int = 1024
    """Sampled tokens whose logits are in memory at once."""

    max_mismatch: float | None = 0.1
    """Largest mean of |log pi - log mu| of one inference server on its tokens, with log pi under the
    weights that the server reports for them; at most 5 counts per token. A server beyond it has gone
    wrong: its tokens since its last good reading are not trained, and it is started anew. Engines show
    about 1e-6 in float32, about 1e-2 in bfloat16, several tenths with wrong weights. Null: errors are
    only measured."""

    min_mismatch_tokens: int = 256
    """Tokens of a server that make a reading. Fewer wait for those of later steps, unless the sum of
    their errors already exceeds `max_mismatch` times this number."""

    mismatch_versions: int = 2
    """Number of earlier steps whose starting weights are kept in host memory, at most `max_staleness`;
    each rank keeps its part. Most tokens are older than the weights that a step begins with, so a few
    rows of each step are read under the kept weights. A server whose tokens are all older than these
    goes unread; with 0, a server without tokens of the step's own version."""

    save_total_limit: int = 0
    """Number of this lineage's newest checkpoints to keep; 0 keeps all. The newest is never removed."""

    max_retained_bytes: int = 1 << 30
    """Size of trained groups without a checkpoint at which the learner saves one before
    `save_steps`."""

    save_trajectories: bool = False
    """Append every trained group to `<run_dir>/trajectories/`, for audits and replay."""

    tensorboard: bool = True
    """Write metrics to `<run_dir>/tensorboard/` as well."""

    wandb: WandbArgs | None = None
    """Write metrics for Weights & Biases as well; short for `trackers.wandb`."""

    trackers: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Further trackers by name, each with its arguments: `console` (`keys`), `jsonl` (`path`), `mlflow`
    (`tracking_uri`, `experiment`), `trackio` (`project`, `space_id`, `server_url`), `wandb` (`project`,
    `mode`), or a class of your own as `module:name`. Every tracker gets the rows of `metrics.jsonl`."""

    metrics: tuple[str, ...] = ()
    """Metrics of your own, each a `Metric` as `module:name`: its numbers join those of every step."""

    @property
    def chosen_trackers(self) -> dict[str, dict[str, Any]]:
        """Arguments of all trackers by name, those of `tensorboard` and `wandb` too."""
        return chosen_trackers(self.trackers, self.tensorboard, self.wandb)

    @property
    def shares_prefixes(self) -> bool:
        """True if passes share prefixes: asked for, and possible."""
        return self.share_prefixes and self.model_args.attn_implementation == "packed"

    def __post_init__(self) -> None:
        check_algorithm(self)
        check_roles(self, self.reference, self.critic, self.strategy_args)
        if self.max_mismatch is not None and not self.max_mismatch > 0:
            raise ValueError("max_mismatch must be positive, or null to let servers be")
        if self.checkpoint_url and not is_url(self.checkpoint_url):
            raise ValueError(
                f"checkpoint_url {self.checkpoint_url!r} is no URL: give one like s3://bucket/runs "
                "(output_dir is the folder on a disk)"
            )
        if self.drain_s <= 0:
            raise ValueError("drain_s must be positive")
        if self.min_tokens_per_micro_batch > self.max_tokens_per_micro_batch:
            raise ValueError("min_tokens_per_micro_batch must not exceed max_tokens_per_micro_batch")
        chosen_trackers(self.trackers, self.tensorboard, self.wandb)
        check_metrics(self.metrics)
        check_optimizer(self.training_args, "training_args", self.strategy_args.resolved_name)
        if self.critic is not None:  # every rank has it whole
            check_optimizer(self.critic.training_args, "critic.training_args", "single")
        self._check_attention()
        self._check_strategy()

    def _check_attention(self) -> None:
        name, dtype = self.model_args.attn_implementation, self.model_args.dtype
        if not name.startswith("flash_attention"):
            return
        if dtype == "float32":
            raise ValueError(
                f"model_args.attn_implementation {name!r} computes in half precision only: use "
                "model_args.dtype bfloat16, or attn_implementation packed"
            )
        if self.device == "cpu":
            raise ValueError(
                f"model_args.attn_implementation {name!r} needs a CUDA device: use device cuda, or "
                "attn_implementation packed"
            )

    def _check_strategy(self) -> None:
        strategy = self.strategy_args.resolved_name
        if strategy == "deepspeed" and self.warm_start is not None:
            raise ValueError(
                "warm_start has an optimizer of its own, which strategy_name deepspeed does not take: "
                "use fsdp2, or warm-start in a run before and give its checkpoint as pretrain"
            )
        if strategy == "megatron" and self.lora is not None:
            raise ValueError(
                "lora puts adapters beside layers that strategy_name megatron replaces: use fsdp2, or "
                "train all weights"
            )
        if strategy != "single" and self.critic is not None and self.critic.shared:
            raise ValueError(
                f"critic.shared reads hidden states that strategy_name {strategy} spreads over ranks: "
                "use a critic with a trunk of its own (shared: false), or one rank"
            )


def check_with_run(config: LearnerConfig, run: RunConfig) -> None:
    """Raises `ValueError` for settings that contradict the run's."""
    if bool(run.pretrain) == (config.from_scratch is not None):
        raise ValueError(
            "give either pretrain (a model to start from) or learner.from_scratch (a new one), not "
            f"{'both: learner.from_scratch=null drops the latter' if run.pretrain else 'neither'}"
        )
    strategy = config.strategy_args.resolved_name
    if run.colocated and strategy in ("deepspeed", "megatron"):
        raise ValueError(
            f"colocated: learner.strategy_args.strategy_name {strategy} cannot give its memory to "
            "servers: use single or fsdp2, or set colocated: false"
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
