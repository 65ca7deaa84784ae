"""AdamW with a global norm bound, and the learning rate as a pure function of the step.

Gradients arrive as unnormalised sums; division by the count and clipping are one multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from tailrace_learner.config import TrainingArgs
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.shards import local
from tailrace_learner.ports import Ranks, UpdateResult


def learning_rate_at(step: int, max_steps: int, args: TrainingArgs) -> float:
    """Rate for the update that follows `step` finished steps."""
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


class SummedAdamW(torch.optim.AdamW):
    """AdamW for unnormalised gradients, whole or sharded over `ranks`."""

    ranks: Ranks = ONE_RANK

    @classmethod
    def of(cls, parameters: list[nn.Parameter], args: TrainingArgs) -> Self:
        """Makes one that decays matrices only, in one kernel per device."""
        matrices = [p for p in parameters if p.dim() >= 2]
        others = [p for p in parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return cls(
            [group for group in groups if group["params"]],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,
        )

    @torch.no_grad()
    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """Divides summed gradients by `count`, clips, steps, clears; an infinite update is dropped.

        The norm is that of all shards. Every rank must call it.
        """
        grads = [local(p.grad) for p in self._parameters() if p.grad is not None]
        if not grads or count <= 0:
            self.zero_grad(set_to_none=True)
            return UpdateResult(0.0, False)
        grad_norm = self._norm(grads) / count
        if not math.isfinite(grad_norm):
            self.zero_grad(set_to_none=True)
            return UpdateResult(grad_norm, False)
        bounded = max_grad_norm / grad_norm if 0 < max_grad_norm < grad_norm else 1.0
        torch._foreach_mul_(grads, bounded / count)
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()
        self.zero_grad(set_to_none=True)
        return UpdateResult(grad_norm, True)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _norm(self, grads: Sequence[Tensor]) -> float:
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads)))))
        if self.ranks.num_ranks == 1:
            return norm
        return math.sqrt(self.ranks.sums([norm * norm])[0])


def make_adamw(parameters: list[nn.Parameter], args: TrainingArgs) -> SummedAdamW:
    """Makes an AdamW that decays matrices only, in one kernel per device."""
    return SummedAdamW.of(parameters, args)
