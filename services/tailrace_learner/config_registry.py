"""Algorithms by name: declarations of estimators, losses and corrections, and the built-in names.

An algorithm is declared once, in the file of its function. The declaration says which keys the function
reads and what it needs; every check asks the declaration. A name in an experiment is a built-in name or
`my_module:NAME`, a declaration in a user's file. Both are imported at the first use, so this module
needs no algorithm and no torch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tailrace.config import ConfigError
from tailrace.config.suggestions import not_one_of
from tailrace.import_path import load_object

# A fact about an algorithm, or a function that reads it from the learner's configuration.
Fact = bool | Callable[[Any], bool]
Function = Callable[..., Any] | None

_PACKAGE = "tailrace_learner.core.algorithms"


@dataclass(frozen=True, slots=True)
class Declaration:
    """Function of an algorithm, and the keys of the `learner` section that it reads."""

    fn: Callable[[Any, Any], Any]
    """Function of the algorithm."""

    reads: tuple[str, ...] = ()
    """Keys of the `learner` section that the function reads."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys that have an effect with this algorithm."""
        return frozenset(self.reads)

    def functions(self) -> Mapping[str, tuple[Function, str]]:
        """Functions of the declaration by field, each with the names of its two arguments."""
        return {"fn": (self.fn, "inputs, config")}

    def __call__(self, inputs: Any, config: Any) -> Any:
        """Computes what the algorithm computes."""
        return self.fn(inputs, config)


@dataclass(frozen=True, slots=True)
class Estimator(Declaration):
    """Declares an advantage estimator: `fn(returns, config)` gives the `Advantages` of one group.

    `core/algorithms/advantages/base.py` describes both.
    """

    compares_group: Fact = False
    """Compares the members of a group with each other: needs two valid ones."""

    compares_step: Fact = False
    """Compares the returns of a tag or of the whole step, by `step_statistic`."""

    step_statistic: Callable[[Any, Any], tuple[float, float]] | None = None
    """`step_statistic(returns, config)` gives the mean and the scale of returns [n], as in `starpo`."""

    compares_observations: Fact = False
    """Compares turns that began with the same observation."""

    token_rewards: bool = False
    """Takes rewards of single tokens, so that `kl_in: reward` is possible."""

    divergence_in_reward: bool = False
    """`kl_in` is `reward` unless the experiment sets it."""

    whitens: bool = False
    """Its advantages are always whitened over the step."""

    needs_values: bool = False
    """Takes the values of a critic."""

    needs_greedy: bool = False
    """Compares with a member that was played at temperature 0."""

    def __post_init__(self) -> None:
        if self.compares_step and self.step_statistic is None:
            raise ValueError("an Estimator with compares_step needs step_statistic: give both")

    @property
    def keys(self) -> frozenset[str]:
        """Keys that have an effect with this estimator."""
        return frozenset((*self.reads, "zero_variance_groups") if self.compares_group else self.reads)

    def functions(self) -> Mapping[str, tuple[Function, str]]:
        """See `Declaration.functions`."""
        return {
            "fn": (self.fn, "returns, config"),
            "step_statistic": (self.step_statistic, "returns, config"),
        }


@dataclass(frozen=True, slots=True)
class Loss(Declaration):
    """Declares a policy loss: `fn(inputs, config)` gives `LossTerms` from `LossInputs`.

    `selects(tokens, config)` picks tokens [N] of a whole mini-batch (`BatchTokens`). The mini-batch is
    passed once without gradient before its update, and no backward pass begins before it is complete.
    `core/algorithms/losses/base.py` describes all of them.
    """

    selects: Callable[[Any, Any], Any] | None = None
    """Picks tokens of a whole mini-batch."""

    off_policy: bool = False
    """Weighs tokens by the policy that sampled them, so it takes no correction."""

    reads_turns: bool = False
    """Reads `LossInputs.turns`."""

    has_divergence: bool = False
    """Is defined with the divergence in the loss."""

    ignores_advantages: bool = False
    """Trains tokens whatever their advantage."""

    def functions(self) -> Mapping[str, tuple[Function, str]]:
        """See `Declaration.functions`."""
        return {"fn": (self.fn, "inputs, config"), "selects": (self.selects, "tokens, config")}


@dataclass(frozen=True, slots=True)
class Correction(Declaration):
    """Declares a behaviour correction: `fn(inputs, config)` gives weights [M] and counts.

    The counts are sums over tokens by name, reported as fractions.
    """


@dataclass(frozen=True, slots=True)
class Optimizer(Declaration):
    """Declares an optimizer: `fn(param_groups, args)` makes a `torch.optim.Optimizer`.

    `args` is the section `training_args`, `reads` names its `adam_` keys that have an effect, and the
    function takes the keys of `optimizer_args` as keyword arguments. The learner sets the learning rate
    of every group before each step.
    """

    elementwise: bool = False
    """Updates each element of a weight from that element's gradients and state alone. Ranks may then
    hold parts of a weight."""

    def functions(self) -> Mapping[str, tuple[Function, str]]:
        """See `Declaration.functions`."""
        return {"fn": (self.fn, "param_groups, args")}


@dataclass(frozen=True, slots=True)
class Metric(Declaration):
    """Declares metrics of a step: `fn(step, config)` gives numbers by name from `StepData`.

    A number is null where it is unknown. `core/algorithms/metrics.py` describes the data.
    """

    def functions(self) -> Mapping[str, tuple[Function, str]]:
        """See `Declaration.functions`."""
        return {"fn": (self.fn, "step, config")}


D = TypeVar("D", bound=Declaration)


class AlgorithmRegistry(Mapping[str, D], Generic[D]):
    """Built-in declarations of one kind. `path`: their import path, with {name} or {NAME} in it."""

    def __init__(self, kind: type[D], key: str, path: str, names: str) -> None:
        self.kind = kind
        self.key = key  # of the experiment that chooses one
        self._place = f"learner.{key}"
        self._path = path
        self._names = tuple(names.split())
        self._found: dict[str, D] = {}

    def __getitem__(self, name: str) -> D:
        if name not in self._names:
            raise KeyError(name)
        return self.find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def find(self, name: str) -> D:
        """The declaration that an experiment names; `ConfigError` names the key and the remedy."""
        if name not in self._found:
            self._found[name] = self._load(name)
        return self._found[name]

    def readers(self, key: str) -> list[str]:
        """Built-in algorithms that read a key of the configuration, sorted."""
        return sorted(name for name, declared in self.items() if key in declared.keys)

    def all_with(self, field: str) -> str:
        """Names of the built-in algorithms that declare `field`, as a list in a sentence."""
        return ", ".join(sorted(name for name, declared in self.items() if getattr(declared, field)))

    def path(self, name: str) -> str:
        """Import path of a built-in declaration."""
        return f"{_PACKAGE}.{self._path.format(name=name, NAME=name.upper())}"

    def _load(self, name: str) -> D:
        if name in self._names:
            path = self.path(name)
        elif ":" in name or "." in name:
            path = name
        else:
            raise ConfigError(
                f"{self._place}: {not_one_of(repr(name), self._names)} (one of your own: "
                f"my_module:NAME, with NAME = {self.kind.__name__}(function) in the module)"
            )
        return self._checked(load_object(path, self._place), path)

    def _checked(self, found: object, path: str) -> D:
        kind = self.kind.__name__
        if not isinstance(found, self.kind):
            raise ConfigError(
                f"{self._place}: {path!r} is a {type(found).__name__}, not a declared {kind}: write "
                f"NAME = {kind}(function) in the module and name that"
            )
        for field, (function, arguments) in found.functions().items():
            if function is not None:
                self._check_signature(function, arguments, f"{path}, {field}")
        return found

    def _check_signature(self, function: Callable[..., Any], arguments: str, place: str) -> None:
        try:
            inspect.signature(function).bind(*arguments.split(", "))
        except TypeError as error:
            raise ConfigError(
                f"{self._place}: {place}: cannot be called with ({arguments}): {error}; "
                "let it take both"
            ) from error


ESTIMATORS = AlgorithmRegistry(
    Estimator,
    "adv_estimator",
    "advantages.{name}:ESTIMATOR",
    "grpo rloo reinforce reinforce_plus_plus reinforce_plus_plus_baseline gae remax opo starpo "
    "turn_reinforce gigpo step_reinforce",
)
LOSSES = AlgorithmRegistry(
    Loss,
    "loss",
    "losses.{name}:LOSS",
    "vanilla_pg ppo_clip dapo grpo decoupled_ppo segment gspo gmpo cispo sapo tis_pg topr kimi15 m2po "
    "kl_cov clip_cov dppo_tv",
)
CORRECTIONS = AlgorithmRegistry(
    Correction, "behaviour_correction", "corrections:{NAME}", "tis mis icepop none"
)
OPTIMIZERS = AlgorithmRegistry(Optimizer, "training_args.optimizer", "optimizers:{NAME}", "adamw sgd")
METRICS = AlgorithmRegistry(Metric, "metrics", "metrics:{NAME}", "returns tags counts tokens")
REGISTRIES = (ESTIMATORS, LOSSES, CORRECTIONS)
