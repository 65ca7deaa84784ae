"""Optimizers by name: the formulas of the built-in ones, a user's own, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tailrace.config import ConfigError
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.step.optimizer import SummedOptimizer, try_optimizer

OWN = """
import torch
from tailrace_learner.core.algorithms import Optimizer

class SignDescent(torch.optim.Optimizer):
    def __init__(self, param_groups, lr, scale):
        super().__init__(param_groups, {"lr": lr, "scale": scale, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.state[parameter]["last"] = parameter.grad.sign()
                parameter.sub_(group["lr"] * group["scale"] * parameter.grad.sign())

class Greedy(SignDescent):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign())

class Counting(SignDescent):
    def step(self):
        super().step()
        for state in self.state.values():
            state["count"] = 1

class Slowing(SignDescent):
    def step(self):
        super().step()
        for group in self.param_groups:
            group["scale"] *= 0.5

def sign_descent(param_groups, args, *, scale=1.0):
    return SignDescent(param_groups, args.learning_rate, scale)

def counting(param_groups, args):
    return Counting(param_groups, args.learning_rate, 1.0)

SIGN = Optimizer(sign_descent, elementwise=True)
WHOLE = Optimizer(sign_descent)
COUNTING = Optimizer(counting)
SLOWING = Optimizer(lambda param_groups, args: Slowing(param_groups, args.learning_rate, 1.0))
GREEDY = Optimizer(lambda param_groups, args: Greedy(param_groups, args.learning_rate, 1.0))
STRANGE = Optimizer(lambda param_groups, args: object())
LONELY = Optimizer(lambda param_groups: None)
"""


@pytest.fixture
def own_module(user_module: Callable[[str, str], str]) -> str:
    return user_module("my_optimizers", OWN)


def args_of(**settings: Any) -> TrainingArgs:
    return msgspec.convert(settings, TrainingArgs)


def trained(args: TrainingArgs, num_updates: int = 3) -> list[float]:
    """A weight matrix of one element after updates with gradient sums 2 over 2 tokens."""
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = SummedOptimizer.of([weight], args)
    found = []
    for _ in range(num_updates):
        weight.grad = torch.full((1, 1), 2.0)
        optimizer.update(count=2, learning_rate=args.learning_rate, max_grad_norm=0.0)
        found.append(float(weight.detach()))
    return found


def test_sgd_moves_by_its_velocity_and_decays_matrices() -> None:
    args = args_of(
        optimizer="sgd", optimizer_args={"momentum": 0.5}, learning_rate=0.1, weight_decay=0.01
    )
    weight, velocity, expected = 1.0, 0.0, []
    for _ in range(3):
        velocity = 0.5 * velocity + (1.0 + 0.01 * weight)
        weight -= 0.1 * velocity
        expected.append(weight)
    assert trained(args) == pytest.approx(expected)


def test_a_weight_decays_from_its_first_gradient_on() -> None:
    """Several ranks add zeros for a weight that none of them used; one rank has no gradient for it."""
    args = args_of(learning_rate=0.1, weight_decay=0.5)
    idle, busy = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1, 1))
    optimizer = SummedOptimizer.of([idle, busy], args)
    found = []
    for gradient in (0.0, 1.0, 0.0):
        idle.grad, busy.grad = torch.full((1, 1), gradient), torch.ones(1, 1)
        optimizer.update(count=1, learning_rate=0.1, max_grad_norm=0.0)
        found.append(float(idle.detach()))
    assert found[0] == 1.0
    assert found[2] < found[1] < 1.0


def test_an_optimizer_of_a_users_file_updates_the_weights(own_module: str) -> None:
    args = args_of(optimizer=f"{own_module}:SIGN", optimizer_args={"scale": 2.0}, learning_rate=0.125)
    try_optimizer(args, "learner.training_args")
    assert trained(args) == [0.75, 0.5, 0.25]


def checked(**settings: Any) -> LearnerConfig:
    return msgspec.convert(settings, LearnerConfig)


@pytest.mark.parametrize("settings", [{}, {"num_ranks": 2}])
def test_an_elementwise_optimizer_fits_any_number_of_ranks(
    settings: dict[str, Any], own_module: str
) -> None:
    for name in ("sgd", f"{own_module}:SIGN"):
        config = checked(training_args={"optimizer": name}, strategy_args=settings)
        assert config.training_args.optimizer == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, "'adam' is none of adamw, sgd; did you mean 'adamw'"),
        ({"optimizer": "my_optimizers:NONE"}, "has no 'NONE'"),
        ({"optimizer": "my_optimizers:SignDescent"}, "not a declared Optimizer"),
        ({"optimizer": "my_optimizers:LONELY"}, r"cannot be called with \(param_groups, args\)"),
        ({"optimizer_args": {"momentum": 0.9}}, "optimizer_args: .*unexpected keyword.*momentum"),
        ({"optimizer": "sgd", "adam_beta1": 0.5}, "adam_beta1 is not read by .*'sgd'"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(
    settings: dict[str, Any], message: str, own_module: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        checked(training_args=settings)


@pytest.mark.parametrize("section", ["training_args", "critic.training_args"])
def test_a_floor_of_a_rate_that_never_falls_is_refused(section: str) -> None:
    def given(**args: Any) -> dict[str, Any]:
        role = {"training_args": {"min_lr_ratio": 0.1, **args}}
        return role if section == "training_args" else {"critic": role, "adv_estimator": "gae"}

    with pytest.raises(ValueError, match=rf"^{section}.min_lr_ratio is not read with lr_sched"):
        checked(**given())
    checked(**given(lr_scheduler_type="cosine"))


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("my_optimizers:WHOLE", "fsdp2", "not declared elementwise"),
        ("sgd", "deepspeed", "takes adamw alone"),
    ],
)
def test_an_optimizer_must_fit_the_strategy(
    name: str, strategy: str, message: str, own_module: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked(
            training_args={"optimizer": name},
            strategy_args={"strategy_name": strategy, "num_ranks": 2},
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "my_optimizers:STRANGE"}, r"made a object, not a torch\.optim\.Optimizer"),
        ({"optimizer": "my_optimizers:GREEDY"}, "AttributeError.*skip weights whose grad is None"),
        ({"optimizer": "my_optimizers:COUNTING"}, "state 'count' is a int"),
        ({"optimizer": "my_optimizers:SLOWING"}, "changes 'scale' of its param_groups.* not hold"),
        ({"optimizer": "sgd", "optimizer_args": {"momentum": -1.0}}, "Invalid momentum"),
    ],
)
def test_an_optimizer_is_tried_before_the_model_is_loaded(
    settings: dict[str, Any], message: str, own_module: str
) -> None:
    with pytest.raises(ValueError, match=message):
        try_optimizer(args_of(**settings), "learner.training_args")
