"""Configuration of the reward service: the section `reward` of an experiment file."""

import re
from typing import Literal

from msgspec.structs import replace

from tailrace.config import Config
from tailrace_reward.config_models import JudgeArgs, RewardModelArgs

__all__ = ["JudgeArgs", "RewardConfig", "RewardEntry", "RewardModelArgs"]

_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


class RewardEntry(Config, frozen=True, kw_only=True):
    """One component of the reward."""

    name: str
    """Name of the component in scores and metrics."""

    kind: Literal["env_return", "function", "model", "judge"] = "env_return"
    """`env_return`: the sum of the environment's rewards. `function`: a Python function. `model`: a
    reward model. `judge`: a language model that gives a number."""

    function: str = ""
    """`module:name` of the function, for example `my_rewards:brevity`: `def brevity(task, messages,
    metrics) -> float`, plain or async. The module is imported from the folder of the experiment file,
    the folder where Tailrace was started, or installed packages."""

    pretrain: str = ""
    """Directory (or hub name) of the reward model; empty: `reward_pretrain`."""

    judge: JudgeArgs | None = None
    """Endpoint, prompt and limits of the judge."""

    weight: float = 1.0
    """Factor of this component in the sum."""

    timeout_s: float = 10.0
    """Time limit of a call of the function, or of all attempts at the judge together. After it the
    episode has no reward and is an infrastructure failure. Other kinds do not read it."""

    def __post_init__(self) -> None:
        if self.kind == "function" and not _FUNCTION.match(self.function):
            raise ValueError(
                f"reward {self.name!r}: function must be written module:name, found {self.function!r}"
            )
        if self.kind == "judge" and self.judge is None:
            raise ValueError(
                f"reward {self.name!r}: kind judge needs `judge` with base_url, model, prompt"
            )
        owners = {"function": "function", "pretrain": "model", "judge": "judge"}
        for key, kind in owners.items():
            if getattr(self, key) and self.kind != kind:
                raise ValueError(f"reward {self.name!r}: has a {key}, so kind must be {kind!r}")
        if self.timeout_s <= 0:
            raise ValueError(f"reward {self.name!r}: timeout_s must be positive")


_OF_ENVIRONMENT = (RewardEntry(name="env_return"),)
_OF_MODEL = (RewardEntry(name="reward_model", kind="model"),)


class RewardConfig(Config, frozen=True, kw_only=True):
    """The reward service."""

    rewards: tuple[RewardEntry, ...] = ()
    """Components; an episode's reward is their weighted sum. Empty: the reward model if there is a
    `reward_pretrain`, else the return of the environment."""

    reward_pretrain: str = ""
    """Directory (or hub name) of a reward model, for components of the kind `model` without a
    `pretrain`: a Hugging Face model that classifies sequences with one label, or gives a value for each
    token, of which the last counts."""

    model_args: RewardModelArgs = RewardModelArgs()
    """Device, precision and batches of reward models."""

    num_processes: int = 2
    """Processes that call reward functions, one call each at a time; started only if there are
    functions."""

    mailbox: int = 1024
    """Requests that may wait; further ones are refused, and their senders try again."""

    drain_s: float = 10.0
    """Time to answer accepted requests after SIGTERM."""

    @property
    def components(self) -> tuple[RewardEntry, ...]:
        """Returns the components with their defaults."""
        rewards = self.rewards or (_OF_MODEL if self.reward_pretrain else _OF_ENVIRONMENT)
        return tuple(map(self._with_model, rewards))

    def _with_model(self, entry: RewardEntry) -> RewardEntry:
        if entry.kind != "model":
            return entry
        return replace(entry, pretrain=entry.pretrain or self.reward_pretrain)

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards must have different names, found {', '.join(names)}")
        if self.num_processes < 1 or self.mailbox < 1:
            raise ValueError("num_processes and mailbox must be at least 1")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        self._check_models()

    def _check_models(self) -> None:
        models = [entry for entry in self.components if entry.kind == "model"]
        for entry in models:
            if not entry.pretrain:
                raise ValueError(
                    f"reward {entry.name!r}: kind model needs a model: give it a pretrain, or give "
                    "reward_pretrain"
                )
        if self.reward_pretrain and self.reward_pretrain not in {entry.pretrain for entry in models}:
            raise ValueError(
                "reward_pretrain is read by components of the kind model without a pretrain of their "
                "own, and there is none: add one to rewards, or remove it"
            )
