"""`deepspeed` with `zero_stage` 3: weights are cut over the ranks too and gathered where they are read.

DeepSpeed gathers a module's weights while it computes, forward or backward, and frees them afterwards.
The output matrix is read outside of its module, so it belongs to the root: gathered for the whole pass.
All ranks must use the same modules in the same order. Between passes nothing is gathered, so shards may
be read or changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy
from tailrace_learner.adapters.strategies.root import RootedPolicy
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.model.shards import local
from tailrace_learner.ports import Ranks


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
        """Cut the weights (collective); every rank must have loaded the same ones."""
        rooted = super().spread(policy)
        self._deepspeed.zero.register_external_parameter(
            self._engine.module, policy.model.get_output_embeddings().weight
        )
        given = {field.name: getattr(rooted, field.name) for field in fields(RootedPolicy)}
        return GatheringPolicy(**given)

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns all shards together (collective)."""
        with self._deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the shape of all shards together."""
        full: Sequence[int] = parameter.ds_shape  # type: ignore[attr-defined]
        return tuple(full)

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
