"""`fsdp2`: weights, gradients and moments cut over the ranks by PyTorch's `fully_shard`.

Every decoder layer is gathered when it computes; the other weights (embeddings, last norm, output
matrix) when a forward begins. After a forward and after a backward nothing stays gathered, so weights
may be read or changed in between. Gradients are *summed* over ranks: core divides once, by the step's
global count. In bfloat16 a layer is gathered in bfloat16: that halves the traffic and saves autocast
its copies, which would stay from the forward to the backward. Shards, sums of gradients and the other
weights are float32.
"""

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tailrace_learner.adapters.strategies.base import Root, RootedPolicy, Strategy
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.model.forward_path import decoder_of
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.ports import Ranks


class Fsdp2Strategy(Strategy):
    """Data parallel and fully sharded."""

    cuts_rows = True

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = self.world = ranks
        self._mesh: DeviceMesh = init_device_mesh(device.type, (ranks.num_ranks,))

    def spread(self, policy: PolicyModel) -> RootedPolicy:
        """Cut the weights."""
        narrow = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        of_text = set(decoder_of(policy.model).modules())
        for layer in _layers(policy.model):
            precision = narrow if policy.autocast else MixedPrecisionPolicy()
            self._shard(layer, precision, sums_unused=layer in of_text)
        # Our layers end in a view; later additions to it are out of place.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        root = Root(policy.model)
        self._shard(root, MixedPrecisionPolicy())
        return RootedPolicy.of(policy, root)

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> SummedOptimizer:
        """Make the optimizer of the shards; its norm is that of all ranks."""
        super().make_optimizer(policy, args)
        self._optimizer.ranks = self.ranks
        return self._optimizer

    def _gathered(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _part(self, tensor: Tensor, like: nn.Parameter) -> Tensor:
        assert isinstance(like, DTensor)
        on_device = tensor.to(like.device)
        return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)

    def _shard(
        self, module: nn.Module, precision: MixedPrecisionPolicy, *, sums_unused: bool = False
    ) -> None:
        """Cuts a module. `sums_unused`: a weight may have a gradient on some ranks only (experts)."""
        sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if sums_unused and hasattr(sharded, "set_reduce_scatter_unused_params"):  # not before 2.13
            sharded.set_reduce_scatter_unused_params(True, recurse=False)


def _layers(model: Any) -> list[nn.Module]:
    """Modules that must not be split, as the architecture declares them; inner ones first.

    Those that have weights of others are left out: a weight is cut once (Zamba 2's shared blocks).
    """
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    inner = {part for module in found for part in module.modules() if part is not module}
    held = Counter(each for module in found if module not in inner for each in module.parameters())
    return [module for module in found[::-1] if all(held[each] == 1 for each in module.parameters())]
