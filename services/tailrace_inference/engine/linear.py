"""Matrix products of the Llama forward.

torch multiplies float32 matrices on the CPU with MKL. MKL reaches 100 GFLOP/s on one Zen 5 core;
oneDNN, also part of torch, reaches 170 to 230 for larger products. On Intel cores MKL is faster
(32 rows of 128 by 768 on a Sapphire Rapids core: 56 us against 78). `select_matmul` chooses.
oneDNN's operator has no public name for float32.

MKL multiplies few rows faster if the columns of the weights are contiguous in memory (32 rows, an Ice
Lake core: 384 by 128 in 22 us against 82, 128 by 256 in 16 against 29): `as_read` stores them so.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tailrace.processor import CpuMatmul, matmul_library

# Smallest number of multiplications at which oneDNN's constant cost pays off.
_MIN_PRODUCTS = 1 << 20

_onednn: Any = None  # `(input, weight, bias, "none", [], "")`, of this process; `select_matmul` sets it


def has_onednn_linear() -> bool:
    """Tell whether this build of torch has oneDNN's fused linear kernel."""
    backend: Any = torch.backends.mkldnn
    return backend.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def select_matmul(choice: CpuMatmul) -> None:
    """Selects the library of `choice` for this process; raises `ValueError`.

    Models loaded earlier keep the memory order of their weights.
    """
    global _onednn
    library = matmul_library(choice, has_onednn=has_onednn_linear())
    _onednn = torch.ops.mkldnn._linear_pointwise if library == "onednn" else None


def project(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`states` [T, K] times the transpose of `weight` [N, K], plus `bias` [N]."""
    if _pays(states, weight):
        product: Tensor = _onednn(states, weight, bias, "none", [], "")
        return product
    return linear(states, weight, bias)


def project_onto(
    residual: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`residual` [T, N] plus `project(states, weight, bias)`."""
    if _pays(states, weight):
        total: Tensor = _onednn.binary(states, residual, weight, bias, "add")
        return total
    total = torch.addmm(residual, states, weight.t())
    return total if bias is None else total + bias


def as_read(weight: Tensor) -> Tensor:
    """Copy of `weight` [N, K] in the memory order that `project` reads fastest."""
    if _onednn is None and weight.dtype == torch.float32 and weight.device.type == "cpu":
        return weight.t().contiguous().t()
    return weight.contiguous()


def _pays(states: Tensor, weight: Tensor) -> bool:
    return (
        _onednn is not None
        and states.dtype == torch.float32
        and states.device.type == "cpu"
        and states.shape[0] * weight.numel() >= _MIN_PRODUCTS
    )
