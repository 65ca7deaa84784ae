"""Stochastic gradient descent with momentum: half of AdamW's memory.

    v = momentum v + g,  w = w - learning_rate v

Sutskever et al. 2013, "On the Importance of Initialization and Momentum in Deep Learning".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.config_registry import Optimizer

if TYPE_CHECKING:
    import torch


def sgd(
    param_groups: list[dict[str, Any]],
    args: TrainingArgs,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Make torch's SGD; `momentum: 0` keeps no moment."""
    optim = importlib.import_module("torch.optim")  # a declaration is read where there is no torch
    made: torch.optim.Optimizer = optim.SGD(
        param_groups, lr=args.learning_rate, momentum=momentum, nesterov=nesterov
    )
    return made


OPTIMIZER = Optimizer(sgd, elementwise=True)
