"""Run by Python as any process starts that has this folder on its path: updates of a server fail.

The file `<server id>.stage` beside this one lets the next update of that server fail when it is loaded,
`<server id>.apply` when half of its tensors are active. The test works on a copy of this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def _is_asked(what: str) -> bool:
    server_id = sys.orig_argv[sys.orig_argv.index("--server-id") + 1]
    try:
        (HERE / f"{server_id}.{what}").unlink()
    except FileNotFoundError:
        return False
    return True


def _let_updates_fail() -> None:
    import torch

    from tailrace_inference.engine.engine import TorchEngine

    healthy_stage: Callable[..., None] = TorchEngine.stage
    healthy_apply: Callable[[Any], float] = TorchEngine.apply

    def stage(engine: Any, *update: Any) -> None:
        if _is_asked("stage"):
            raise torch.OutOfMemoryError("out of memory, as the test asks")
        healthy_stage(engine, *update)

    def apply(engine: Any) -> float:
        if _is_asked("apply"):
            staged = engine._staged
            for target, value in list(zip(staged.targets, staged.values, strict=True))[::2]:
                target.copy_(value)
            raise RuntimeError("the device failed, as the test asks")
        return healthy_apply(engine)

    TorchEngine.stage = stage  # type: ignore[assignment,method-assign]
    TorchEngine.apply = apply  # type: ignore[assignment,method-assign]


if "tailrace_inference" in sys.orig_argv:
    _let_updates_fail()
