"""`deepspeed`: ZeRO stages 1 and 2 by the package of that name (extra `deepspeed`).

Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054. DeepSpeed reduces gradients as mean over ranks after
every backward and keeps the part of its stage. Core needs sums, divided once by the step's count:
division by `count / num_ranks` is DeepSpeed's unscaling, so the count is its loss scale. Weights stay
whole on every rank; `zero3` cuts them too.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.import_path import load_extra
from tailrace_learner.adapters.strategies.base import Moments
from tailrace_learner.adapters.strategies.root import Root, RootedPolicy
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import torch_optimizer
from tailrace_learner.ports import Ranks, UpdateResult

_COMPILED_COLLECTIVES = (
    "deepspeed_shm_comm"  # on the CPU DeepSpeed would compile them at the start; gloo is enough
)


class ZeroOptimizer:
    """DeepSpeed's engine as an optimizer of summed gradients."""

    def __init__(self, engine: Any, num_ranks: int) -> None:
        self._engine = engine
        self._num_ranks = num_ranks

    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """Divide summed gradients by `count`, clip, step, clear; discard those not finite."""
        zero = self._engine.optimizer
        if count <= 0:
            self.zero_grad()
            return UpdateResult(0.0, False)
        for group in zero.param_groups:
            group["lr"] = learning_rate
        zero.clip_grad = max_grad_norm
        zero.loss_scaler.cur_scale = count / self._num_ranks
        try:
            self._engine.step()
        finally:
            zero.loss_scaler.cur_scale = 1.0
        norm = float(self._engine.get_global_grad_norm())
        return UpdateResult(norm, bool(self._engine.was_step_applied()) and math.isfinite(norm))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also the reduced ones that stages 1 and 2 keep for an update."""
        zero = self._engine.optimizer
        zero.zero_grad(set_to_none=set_to_none)
        getattr(zero, "all_grad_tensors", {}).clear()


class DeepspeedStrategy:
    """ZeRO of stage 1 or 2 over all ranks."""

    def __init__(self, ranks: Ranks, stage: int, args: TrainingArgs) -> None:
        self.ranks = self.world = ranks
        self._stage = stage
        self._args = args

    def spread(self, policy: PolicyModel) -> RootedPolicy:
        """Give the model to DeepSpeed (collective); `ConfigError` without the package."""
        key = "learner.strategy_args.strategy_name deepspeed"
        deepspeed = load_extra("deepspeed", "deepspeed", key)
        deepspeed.ops.__compatible_ops__[_COMPILED_COLLECTIVES] = False
        self._deepspeed = deepspeed
        root = Root(policy.model)
        self._engine, *_ = deepspeed.initialize(
            model=root,
            optimizer=torch_optimizer(policy.parameters, self._args),
            config=self._config(),
            dist_init_required=False,
        )
        self._make_states()
        given = {field.name: getattr(policy, field.name) for field in fields(PolicyModel)}
        return RootedPolicy(**given, root=self._engine)

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> ZeroOptimizer:
        """Returns the engine's AdamW, made in `spread`."""
        return ZeroOptimizer(self._engine, self.ranks.num_ranks)

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the weight, which every rank has."""
        return tensor.detach()

    def moments(self, parameter: nn.Parameter) -> Moments:
        """Returns the moments in full (collective); none before the first update."""
        step = next(iter(self._states()), {}).get("step")
        if step is None or not float(step) or not parameter.requires_grad:
            return {}
        get = self._deepspeed.utils.safe_get_full_optimizer_state
        return {"step": step} | {name: get(parameter, name) for name in ("exp_avg", "exp_avg_sq")}

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Set each rank's part; all ranks share the count of steps."""
        for name in ("exp_avg", "exp_avg_sq"):
            self._set_moment(parameter, name, moments[name].to(parameter.device))
        for state in self._states():
            state["step"].copy_(moments["step"])

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the parameter's shape."""
        return tuple(parameter.shape)

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,  # core decides when to update
            "gradient_clipping": self._args.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": self._zero_config(),
        }

    def _zero_config(self) -> dict[str, Any]:
        return {"stage": self._stage, "overlap_comm": False}

    def _set_moment(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, name)

    def _states(self) -> list[dict[str, Any]]:
        return list(self._engine.optimizer.optimizer.state.values())

    def _make_states(self) -> None:
        """Make AdamW's state before the first step, in which DeepSpeed would make it."""
        zero = self._engine.optimizer
        self._fill_states(zero.optimizer.state, zero.single_partition_of_fp32_groups)
        zero._lazy_init_hp_params_optimizer_state()

    def _fill_states(self, states: dict[Tensor, dict[str, Tensor]], flats: list[Tensor]) -> None:
        for flat in flats:
            states[flat] = {
                "step": torch.zeros((), device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
