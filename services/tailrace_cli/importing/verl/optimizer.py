"""The optimizers of verl, one table for each role that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import Derived, Renamed, values
from tailrace.config.settings.setting import Lookup
from tailrace_cli.importing.rules import NoEffectError, ratio_of_steps

_SAME = (
    ("optim.lr", "learning_rate"),
    ("optim.weight_decay", "weight_decay"),
    ("optim.min_lr_ratio", "min_lr_ratio"),
    ("grad_clip", "max_grad_norm"),
    ("optim.clip_grad", "max_grad_norm"),
)


def optimizer(role: str, args: str) -> tuple[Renamed | Derived, ...]:
    """The settings of `role` as those below `args`."""
    optim = f"{role}.optim"

    def betas(both: Any, _lookup: Lookup) -> Mapping[str, Any]:
        first, second = both
        return {f"{args}.adam_beta1": first, f"{args}.adam_beta2": second}

    def warmup(steps: Any, _lookup: Lookup) -> Mapping[str, Any]:
        """Negative: the ratio says it."""
        return {f"{args}.warmup_steps": steps} if steps >= 0 else {}

    def older(schedule: Any, lookup: Lookup) -> Mapping[str, Any]:
        if lookup(f"{optim}.lr_scheduler_type") is not None:
            raise NoEffectError("optim.lr_scheduler_type says it already")
        return {f"{args}.lr_scheduler_type": values.schedule(schedule)}

    schedule = (f"{args}.lr_scheduler_type",)
    return (
        *(Renamed(f"{role}.{key}", (f"{args}.{ours}",)) for key, ours in _SAME),
        Derived(f"{optim}.betas", (f"{args}.adam_beta1", f"{args}.adam_beta2"), betas, "both of AdamW"),
        Derived(f"{optim}.lr_warmup_steps", (f"{args}.warmup_steps",), warmup, "if not negative"),
        ratio_of_steps(
            f"{optim}.lr_warmup_steps_ratio", f"{args}.warmup_steps", "trainer.total_training_steps"
        ),
        Renamed(f"{optim}.lr_scheduler_type", schedule, values.schedule),
        Derived(f"{optim}.warmup_style", schedule, older, "not beside `lr_scheduler_type`"),
    )
