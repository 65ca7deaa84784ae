"""Optimizers. Each is a function that makes a torch optimizer, and its declaration."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.config_registry import Optimizer

if TYPE_CHECKING:
    import torch


def adamw(param_groups: list[dict[str, Any]], args: TrainingArgs) -> torch.optim.Optimizer:
    """Make torch's AdamW with the `adam_` keys of `args`, one kernel per device.

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
    """
    optim = importlib.import_module("torch.optim")  # a declaration is read where there is no torch
    made: torch.optim.Optimizer = optim.AdamW(
        param_groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )
    return made


def sgd(
    param_groups: list[dict[str, Any]],
    args: TrainingArgs,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Make torch's SGD with momentum: half of AdamW's memory; `momentum: 0` keeps no moment.

        v = momentum v + g,  w = w - learning_rate v

    Sutskever et al. 2013, "On the Importance of Initialization and Momentum in Deep Learning".
    """
    optim = importlib.import_module("torch.optim")
    made: torch.optim.Optimizer = optim.SGD(
        param_groups, lr=args.learning_rate, momentum=momentum, nesterov=nesterov
    )
    return made


ADAMW = Optimizer(adamw, reads=("adam_beta1", "adam_beta2", "adam_epsilon"), elementwise=True)
SGD = Optimizer(sgd, elementwise=True)
