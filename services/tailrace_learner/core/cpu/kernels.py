"""Faster float32 arithmetic on the CPU inside a Hugging Face model, with the same results.

`select_matmul` says which library multiplies matrices. Where torch's default library falls back to
AVX2, oneDNN uses AVX-512 (an AMD EPYC, 128 x 256, one thread: 235 against 100 GFLOP/s), forward and
backward. On Intel's processors the default is the faster one (a Xeon, 128 x 384: 172 against 162, and
153 against 94 for the gradient of the weight). RMS norms keep one activation instead of three.
Parameters, their names and what is saved stay the model's own.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailrace.processor import CpuMatmul, matmul_library

_uses_onednn = False  # of this process; `select_matmul` sets it


@cache
def has_onednn_linear() -> bool:
    """Tells whether this build of torch has oneDNN's fused linear kernel."""
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_library and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def select_matmul(choice: CpuMatmul) -> None:
    """Selects the library that `choice` names, in this process; raises `ValueError`."""
    global _uses_onednn
    library = matmul_library(choice, has_onednn=has_onednn_linear())
    _uses_onednn = library == "onednn"


def _matmul_t(left: Tensor, right: Tensor) -> Tensor:
    """left [..., K] times right [N, K] transposed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return product


def matmul_t(left: Tensor, right: Tensor) -> Tensor:
    """left [..., K] times right [N, K] transposed, by the selected library; without autograd."""
    return _matmul_t(left, right) if _by_onednn(left, right) else functional.linear(left, right)


def add_matmul_t(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [N, K] times right [M, K] transposed to `total` [N, M]; without autograd."""
    if _by_onednn(left, right):
        total.add_(_matmul_t(left, right))
    else:
        total.addmm_(left, right.t())


def _by_onednn(*tensors: Tensor) -> bool:
    return _uses_onednn and is_plain(*tensors)


def is_plain(*tensors: Tensor) -> bool:
    """Tells whether all are float32 on the CPU."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        output = _matmul_t(inputs, weight)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_inputs = _matmul_t(grad, weight.t()).view_as(inputs)
        grad_weight = _matmul_t(grad.t(), inputs.reshape(-1, weight.shape[1]).t())
        return grad_inputs, grad_weight, grad.sum(0) if ctx.has_bias else None


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN."""

    replaces = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]."""
        if not _by_onednn(input, self.weight) or torch.is_autocast_enabled("cpu"):
            return functional.linear(input, self.weight, self.bias)
        output: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


def rms_scale(states: Tensor, epsilon: float) -> Tensor:
    """Computes 1 / rms of `states` [..., K] -> [..., 1]."""
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = rms_scale(inputs, epsilon)
        normed: Tensor = inputs * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        upstream = grads[0].contiguous()
        product = upstream * normed
        grad_weight = product.reshape(-1, len(weight)).sum(0)
        along = torch.mv(product.view(-1, len(weight)), weight).view_as(scale).div_(len(weight))
        grad = upstream * weight
        return grad.addcmul_(normed, along, value=-1.0).mul_(scale), grad_weight, None


def _fast_rms_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    weight, epsilon = module.weight, module.variance_epsilon
    output: Tensor = _RmsNorm.apply(inputs, weight, epsilon)  # type: ignore[no-untyped-call]
    return output


def _with_fast_forward(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of the norm's class, faster for float32; other types take its own forward."""

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        has_more = bool(args or kwargs)  # a gate
        # In bfloat16 parameters are gathered as such.
        if not has_more and is_plain(hidden_states, *self.parameters()):
            return _fast_rms_norm(self, hidden_states)
        plain: Tensor = kind.forward(self, hidden_states, *args, **kwargs)
        return plain

    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


def use_fast_kernels(model: nn.Module) -> None:
    """Replaces forwards of linear layers and norms."""
    norms: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        kind = type(module)
        if kind is nn.Linear and _uses_onednn:
            module.__class__ = OneDnnLinear
        elif not hasattr(kind, "replaces") and _is_plain_rms_norm(module):
            norms.setdefault(kind, _with_fast_forward(kind))
            module.__class__ = norms[kind]


def _is_plain_rms_norm(module: nn.Module) -> bool:
    """Tells whether the module computes weight * x / rms(x), by a trial: names mislead."""
    weight = getattr(module, "weight", None)
    if (
        not hasattr(module, "variance_epsilon")
        or not isinstance(weight, nn.Parameter)
        or weight.dim() != 1
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn((3, len(weight)), generator=generator)
    try:
        with torch.no_grad():
            own = module(sample)
    except (TypeError, AttributeError):  # it needs a gate as well
        return False
    return torch.allclose(own, _fast_rms_norm(module, sample), rtol=1e-5, atol=1e-6)
