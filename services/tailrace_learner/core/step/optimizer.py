"""Updates from unnormalised gradient sums, and the learning rate as a pure function of the step.

Division by the count and clipping of the global norm are one multiplication. The torch optimizer behind
an update is the one that `training_args.optimizer` names; moments are whatever tensors it keeps per
parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_learner.config import TrainingArgs
from tailrace_learner.config_registry import OPTIMIZERS
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.policy import local
from tailrace_learner.ports import Ranks, UpdateResult


def learning_rate_at(step: int, max_steps: int, args: TrainingArgs) -> float:
    """Learning rate of the update that follows `step` finished steps."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    span = max(max_steps - args.warmup_steps, 1)
    progress = min((step - args.warmup_steps) / span, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[args.lr_scheduler_type]
    floor = 1.0 if args.lr_scheduler_type == "constant" else args.min_lr_ratio
    return args.learning_rate * (floor + (1.0 - floor) * shape)


def torch_optimizer(parameters: Sequence[nn.Parameter], args: TrainingArgs) -> torch.optim.Optimizer:
    """Make the optimizer that `args` names; weight decay is for matrices alone."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    declared = OPTIMIZERS.find(args.optimizer)
    made: torch.optim.Optimizer = declared.fn(
        [group for group in groups if group["params"]], args, **args.optimizer_args
    )
    return made


class SummedOptimizer:
    """A torch optimizer for unnormalised gradients, whole or sharded over `ranks`."""

    ranks: Ranks = ONE_RANK

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], args: TrainingArgs) -> "SummedOptimizer":
        """Make one for these parameters."""
        return cls(torch_optimizer(parameters, args))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and their settings, as torch has them."""
        return self.inner.param_groups

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Tensors that the optimizer keeps for a parameter; none before its first update."""
        state = self.inner.state.get(parameter, {})
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def set_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
        """Replace the tensors of a parameter."""
        self.inner.state[parameter] = moments

    @torch.no_grad()
    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """Divide summed gradients by `count`, clip, step, clear; discard gradients that are not finite.

        The norm is that of all shards. Every rank must call it.
        """
        moved = {each: local(each.grad) for each in self._parameters() if each.grad is not None}
        squares = self._squares(moved) if moved and count > 0 else []
        grad_norm = math.sqrt(sum(squares)) / count if squares else 0.0
        if not squares or not math.isfinite(grad_norm):
            self.zero_grad(set_to_none=True)
            return UpdateResult(grad_norm, False)
        bounded = max_grad_norm / grad_norm if 0 < max_grad_norm < grad_norm else 1.0
        torch._foreach_mul_(list(moved.values()), bounded / count)
        self._leave_alone(moved, squares)
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.inner.step()
        self.zero_grad(set_to_none=True)
        return UpdateResult(grad_norm, True)

    def _leave_alone(self, moved: Iterable[nn.Parameter], squares: Sequence[float]) -> None:
        """Take the gradients of those that never had another than zeros, so that they do not decay.

        Ranks add zeros for weights that their passes leave unused; on one rank these have no gradient.
        An update of zeros alone stays one.
        """
        for parameter, square in zip(moved, squares, strict=True):
            if not square and any(squares) and not self.inner.state.get(parameter):
                parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _squares(self, grads: Mapping[nn.Parameter, Tensor]) -> list[float]:
        """Squared norms of the whole gradients, by parameter."""
        squares = squared_norms(grads.values())
        return squares if self.ranks.num_ranks == 1 else self.ranks.sums(squares)


def squared_norms(tensors: Iterable[Tensor]) -> list[float]:
    """Sum of the squares of each tensor."""
    squares: list[float] = torch.stack(torch._foreach_norm(list(tensors))).double().square().tolist()
    return squares


def try_optimizer(args: TrainingArgs, key: str) -> None:
    """Try the optimizer on a small matrix and a bias; `ValueError` if it or its checkpoint would fail.

    `key`: section of `args` in the experiment, for the message.
    """
    place = f"{key}.optimizer {args.optimizer!r}"
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        with foreign_code(place):
            made = torch_optimizer(parameters, args)
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(f"it made a {type(made).__name__}, not a torch.optim.Optimizer")
            before = [_settings(group) for group in made.param_groups]
            made.step()
    except ForeignCodeError as error:
        raise ValueError(str(error)) from error
    parameters[0].grad = None
    try:
        with foreign_code(place):
            made.step()
    except ForeignCodeError as error:
        raise ValueError(f"{error}: let its step skip weights whose grad is None") from error
    _check_kept(made, before, place)


def _check_kept(made: torch.optim.Optimizer, before: list[dict[str, str]], place: str) -> None:
    """Raise `ValueError` if the optimizer keeps something that no checkpoint holds."""
    for was, group in zip(before, made.param_groups, strict=True):
        if changed := sorted(key for key, value in _settings(group).items() if was.get(key) != value):
            raise ValueError(
                f"{place}: a step changes {changed[0]!r} of its param_groups, which a checkpoint does "
                "not hold: keep a tensor in its state"
            )
    for state in made.state.values():
        for name, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"{place}: its state {name!r} is a {type(value).__name__}, which a checkpoint "
                    "does not hold: keep a tensor"
                )


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """Settings of a group of parameters as text."""
    return {key: repr(value) for key, value in group.items() if key != "params"}
