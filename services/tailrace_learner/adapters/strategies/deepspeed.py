"""`deepspeed`: ZeRO by the package of that name (extra `deepspeed`).

Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054. DeepSpeed reduces gradients as mean over ranks after
every backward and keeps the part of its stage. Core needs sums, divided once by the step's count:
division by `count / num_ranks` is DeepSpeed's unscaling, so the count is its loss scale.

Stages 1 and 2 leave weights whole on every rank. Stage 3 cuts them too: DeepSpeed gathers a module's
weights while it computes, forward or backward, and frees them afterwards. The output matrix is read
outside of its module, so it belongs to the root: gathered for the whole pass. All ranks must use the
same modules in the same order. Between passes nothing is gathered, so shards may be read or changed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tailrace.import_path import load_extra
from tailrace_learner.adapters.strategies.base import Moments, Root, RootedPolicy, Strategy
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.policy import PolicyModel, local
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


class DeepspeedStrategy(Strategy):
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
        return RootedPolicy.of(policy, self._engine)

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> ZeroOptimizer:
        """Returns the engine's AdamW, made in `spread`."""
        return ZeroOptimizer(self._engine, self.ranks.num_ranks)

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


@dataclass(frozen=True, slots=True)
class GatheringPolicy(RootedPolicy):
    """Policy whose root returns one tensor.

    DeepSpeed counts a backward of the root for every output that a loss uses. An idle rank uses both
    outputs, another rank perhaps only the log-probabilities. With two tensors such a rank would see
    another order of modules than in its last pass, compare it with the others, and wait for ranks that
    saw none.
    """

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the batch's targets, in packed order."""
        learner_logprobs, entropy = self.root(lambda: torch.stack(PolicyModel.forward(self, batch)))
        return learner_logprobs, entropy


class Zero3Strategy(DeepspeedStrategy):
    """ZeRO of stage 3 over all ranks."""

    def __init__(self, ranks: Ranks, args: TrainingArgs) -> None:
        super().__init__(ranks, 3, args)

    def spread(self, policy: PolicyModel) -> GatheringPolicy:
        """Cut the weights (collective)."""
        super().spread(policy)
        self._deepspeed.zero.register_external_parameter(
            self._engine.module, policy.model.get_output_embeddings().weight
        )
        return GatheringPolicy.of(policy, self._engine)

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns all shards together (collective)."""
        with self._deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the shape of all shards together."""
        return tuple(parameter.ds_shape)  # type: ignore[attr-defined]

    def _zero_config(self) -> dict[str, Any]:
        # No gathering ahead or keeping: a gathered weight would miss a change of its shards.
        return super()._zero_config() | {
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }

    def _set_moment(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        # DeepSpeed's own function fails if the number of ranks does not divide the tensor.
        size = local(parameter).numel()
        padded = pad(value.flatten(), (0, size * self.ranks.num_ranks - value.numel()))
        part = padded.narrow(0, size * self.ranks.rank, size)
        self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, name)

    def _make_states(self) -> None:
        zero = self._engine.optimizer
        self._fill_states(zero.optimizer.state, zero.fp32_partitioned_groups_flat)
