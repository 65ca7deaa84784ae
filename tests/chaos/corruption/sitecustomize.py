"""Run by Python as any process starts that has this folder on its path: one server goes wrong.

The first process of inference-1 adds noise to every version that it takes from its third on, and writes
the number of the first of them beside this file. Later starts are healthy. The test works on a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVER = "inference-1"
NUM_GOOD_VERSIONS = 2
NOISE = 2.0  # of each tensor's own deviation
HERE = Path(__file__).parent


def _corrupt() -> None:
    import torch

    from tailrace_inference.engine.engine import TorchEngine

    healthy: Callable[[Any], float] = TorchEngine.apply
    taken: list[int] = []

    def apply(engine: Any) -> float:
        staged = engine._staged
        taken.append(staged.policy_version)
        if len(taken) > NUM_GOOD_VERSIONS:
            for value in staged.values:
                if value.is_floating_point() and value.numel() > 1:
                    value.add_(NOISE * value.std() * torch.randn_like(value))
            (HERE / "first_wrong_version").write_text(str(taken[NUM_GOOD_VERSIONS]))
        return healthy(engine)

    TorchEngine.apply = apply  # type: ignore[method-assign]


def _is_first_start() -> bool:
    try:
        (HERE / "started").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if SERVER in sys.orig_argv and "tailrace_inference" in sys.orig_argv and _is_first_start():
    _corrupt()
