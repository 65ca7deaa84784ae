"""AdamW with a global norm bound, and the learning rate as a pure function of the step.

Gradients arrive as unnormalised sums; division by the count and clipping are one multiplication.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from tailrace_learner.config import TrainingArgs


def learning_rate_at(step: int, max_steps: int, args: TrainingArgs) -> float:
    """The rate for the update that follows `step` finished steps."""
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


def make_adamw(parameters: list[nn.Parameter], args: TrainingArgs) -> torch.optim.AdamW:
    """AdamW that decays matrices only, in one kernel per device."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


class UpdateResult(NamedTuple):
    """What an update did."""

    grad_norm: float  # of the normalised gradient, before clipping
    is_applied: bool  # False: no or non-finite gradient, weights unchanged


@torch.no_grad()
def apply_update(
    optimizer: torch.optim.AdamW, *, count: float, learning_rate: float, max_grad_norm: float
) -> UpdateResult:
    """Divide summed gradients by `count`, clip, step, clear. Non-finite gradients are thrown away."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads or count <= 0:
        optimizer.zero_grad(set_to_none=True)
        return UpdateResult(0.0, False)
    norms = torch._foreach_norm(grads)
    grad_norm = float(torch.linalg.vector_norm(torch.stack(norms))) / count
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        return UpdateResult(grad_norm, False)
    bounded = max_grad_norm / grad_norm if 0 < max_grad_norm < grad_norm else 1.0
    torch._foreach_mul_(grads, bounded / count)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return UpdateResult(grad_norm, True)
