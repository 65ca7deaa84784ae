"""Configuration of the reward service: the section `reward` of an experiment file."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from tailrace.config import Config
from tailrace.config.suggestions import closest
from tailrace.scorers.registry import SCORERS
from tailrace_reward.config_models import GATEWAY, JudgeArgs, RewardModelArgs

__all__ = ["JudgeArgs", "RewardConfig", "RewardEntry", "RewardModelArgs"]

_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


class RewardEntry(Config, frozen=True, kw_only=True):
    """One component of the reward."""

    name: str
    """Name of the component in scores and metrics."""

    kind: Literal["env_return", "scorer", "function", "model", "judge"] = "env_return"
    """`env_return`: the sum of the environment's rewards. `scorer`: a built-in scorer. `function`: a
    Python function. `model`: a reward model. `judge`: a language model that gives a number."""

    scorer: str = ""
    """Name of a built-in scorer: `gsm8k`, `math`, `aime`, `mcq`, `em`, `f1`, `json_schema`, `code` or
    `judge`. Empty: the one for the `data_source` of each row."""

    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Scorers of data sources, by pattern (`my_maths*: math`); they come before the built-in ones."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the function or the named scorer; without a name, those of each scorer by
    its name (`code: {partial: true}`)."""

    function: str = ""
    """`module:name` of the function, for example `my_rewards:brevity`: `def brevity(task, messages,
    metrics) -> float`, plain or async. The module is imported from the folder of the experiment file,
    the folder where Tailrace was started, or installed packages."""

    pretrain: str = ""
    """Directory (or hub name) of the reward model; empty: `reward_pretrain`."""

    judge: JudgeArgs | None = None
    """Endpoint, prompt and limits of the judge; also for `scorer: judge`, and for rows whose data
    source `sources` maps to `judge`."""

    weight: float = 1.0
    """Factor of this component in the sum."""

    timeout_s: float = 10.0
    """Time limit of a call of the function or scorer, or of all attempts at the judge together.
    After it the episode has no reward and is an infrastructure failure. A scorer that uses half of it
    as processor time gives 0: the reply is hostile. Other kinds and `code`, which has `timeout_s` of
    each test in `args`, do not read it."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a reward's name must not be empty")
        if self.kind == "function" and not _FUNCTION.match(self.function):
            raise ValueError(
                f"reward {self.name!r}: function must be written module:name, found {self.function!r}"
            )
        if self.kind == "judge" and self.judge is None:
            raise ValueError(f"reward {self.name!r}: kind judge needs `judge` with base_url and prompt")
        self._check_owners()
        if self.kind == "scorer":
            self._check_scorers()
        if self.timeout_s <= 0:
            raise ValueError(f"reward {self.name!r}: timeout_s must be positive")

    def options_of(self, scorer: str) -> dict[str, Any]:
        """Arguments of a scorer of this component."""
        if self.scorer:
            return self.args if scorer == self.scorer else {}
        options: dict[str, Any] = self.args.get(scorer, {})
        return options

    def _check_owners(self) -> None:
        for key, kinds in _OWNERS.items():
            if getattr(self, key) and self.kind not in kinds:
                known = " or ".join(map(repr, kinds))
                raise ValueError(f"reward {self.name!r}: has a {key}, so kind must be {known}")

    def _check_scorers(self) -> None:
        where = f"reward {self.name!r}"
        options = {self.scorer: self.args} if self.scorer else self.args
        for name in {*options, *self.sources.values()} - SCORERS.keys():
            near = closest(name, SCORERS)
            hint = f"did you mean {near!r}? " if near else ""
            known = f"known: {', '.join(SCORERS)}"
            raise ValueError(f"{where}: there is no scorer {name!r}: {hint}{known}")
        for name, given in options.items():
            _check_names(where, name, given)
        for name in options:
            _check_options(where, name, self.options_of(name))
        if self.judge is None and "judge" in (self.scorer, *self.sources.values()):
            raise ValueError(f"{where}: the scorer judge needs `judge` with base_url and prompt")


def _check_names(where: str, scorer: str, options: object) -> None:
    """Raises `ValueError` for an argument that the scorer does not take."""
    taken = SCORERS[scorer].options
    unknown = sorted(options.keys() - taken) if isinstance(options, dict) else ["args"]
    if unknown:
        has = ", ".join(sorted(taken)) or "none"
        raise ValueError(f"{where}: scorer {scorer!r} has no argument {unknown[0]!r}; it has {has}")


def _check_options(where: str, scorer: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a value of another type than that of its argument."""
    for key, value in options.items():
        kind, is_possible = _OPTIONS[key]
        if not is_possible(value):
            raise ValueError(f"{where}: {key} of the scorer {scorer!r} must be {kind}, found {value!r}")


_YES_OR_NO: tuple[str, Callable[[Any], bool]] = ("true or false", lambda value: type(value) is bool)
_OPTIONS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "strict": _YES_OR_NO,
    "partial": _YES_OR_NO,
    "max_tests": ("a whole number from 1", lambda value: type(value) is int and value > 0),
    "timeout_s": ("a number above 0", lambda value: type(value) in (int, float) and value > 0),
}
_OWNERS = {
    "function": ("function",),
    "pretrain": ("model",),
    "scorer": ("scorer",),
    "sources": ("scorer",),
    "judge": ("judge", "scorer"),
    "args": ("function", "scorer"),
}
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

    @property
    def asks_gateway(self) -> bool:
        """True if a judge is the run's own policy."""
        return any(
            entry.judge is not None and entry.judge.base_url == GATEWAY for entry in self.rewards
        )

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
