"""Code that services and users share; each module and package says what it owns.

The names that users need most are exported here and imported at first use. `tailrace.__version__`
is the version of the installed package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.sdk import AgentLoop, Env, Policy, PolicyFailureError, Tool, Workflow, reward, tool
    from tailrace.tools import ToolWorker
    from tailrace.trainer import Trainer, TrainingFailedError, TrainingRun

__all__ = [
    "AgentLoop",
    "Env",
    "Policy",
    "PolicyFailureError",
    "Tool",
    "ToolWorker",
    "Trainer",
    "TrainingFailedError",
    "TrainingRun",
    "Workflow",
    "reward",
    "tool",
]

_MODULES = {
    "ToolWorker": "tailrace.tools",
    "Trainer": "tailrace.trainer",
    "TrainingFailedError": "tailrace.trainer",
    "TrainingRun": "tailrace.trainer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("tailrace")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "tailrace.sdk")), name)
