"""Matrix products of the lean forward.

torch multiplies float32 matrices on the CPU with MKL, which reaches 100 GFLOP/s on one Zen 5 core;
oneDNN, also inside torch, reaches 170 to 230 from some size on. It has no public name for float32, so
its operator is used where this build of torch has it, and MKL otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# Multiplications from which oneDNN's larger constant cost pays.
_MIN_PRODUCTS = 1 << 20


def _find_onednn() -> Any:
    """The operator `(input, weight, bias, "none", [], "")`, or None."""
    namespace: Any = torch.ops.mkldnn
    backend: Any = torch.backends.mkldnn
    if not backend.is_available() or not hasattr(namespace, "_linear_pointwise"):
        return None
    return namespace._linear_pointwise


_onednn = _find_onednn()


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


def _pays(states: Tensor, weight: Tensor) -> bool:
    return (
        _onednn is not None
        and states.dtype == torch.float32
        and states.device.type == "cpu"
        and states.shape[0] * weight.numel() >= _MIN_PRODUCTS
    )
