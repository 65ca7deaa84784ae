"""Models beside the policy: the reference and the critic."""

from tailrace.config import Config
from tailrace_learner.config_models import TrainingArgs, check_finite


class ReferenceArgs(Config, frozen=True, kw_only=True):
    """Frozen model that the policy is held near to, while `init_kl_coef` is not 0."""

    pretrain: str = ""
    """Directory (or hub name) of its weights. Empty: the weights at the run's start, also after a
    resume."""

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
        check_finite(self, "critic")
        for key in ("value_clip", "critic_warmup", "value_loss_coef"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"critic.{key} must not be negative")
        if self.shared and self.pretrain:
            raise ValueError(
                "critic.pretrain names a model of its own, critic.shared says there is none: give one"
            )
        if not self.shared and self.value_loss_coef != 0.1:
            raise ValueError("critic.value_loss_coef is read with critic.shared only: remove it")
