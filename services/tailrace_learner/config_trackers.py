"""Trackers that the learner can feed, and the `learner.wandb` section."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from tailrace.config import Config
from tailrace.config.suggestions import not_one_of

_IN = "tailrace_learner.adapters.trackers"

TRACKERS: Mapping[str, str] = MappingProxyType(
    {
        "console": f"{_IN}.console:ConsoleTracker",
        "jsonl": f"{_IN}.jsonl:JsonLinesTracker",
        "mlflow": f"{_IN}.mlflow:MlflowTracker",
        "tensorboard": f"{_IN}.tensorboard:TensorboardTracker",
        "trackio": f"{_IN}.trackio:TrackioTracker",
        "wandb": f"{_IN}.wandb:WandbTracker",
    }
)
"""Class of each built-in tracker by its name in `learner.trackers`."""


class WandbArgs(Config, frozen=True, kw_only=True):
    """Metrics for Weights & Biases (extra `wandb`), under `<run_dir>/wandb/`."""

    project: str
    """Project of the run. The run has the experiment's name."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files only; `wandb sync` sends them later. `online` sends each row at once, with
    the key of `wandb login`."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("wandb.project must not be empty")


def chosen_trackers(
    trackers: Mapping[str, dict[str, Any]], tensorboard: bool, wandb: WandbArgs | None
) -> dict[str, dict[str, Any]]:
    """Arguments of every chosen tracker by name; `ValueError` for an unknown or repeated one."""
    for name in trackers:
        if name not in TRACKERS and ":" not in name:
            raise ValueError(f"trackers: {not_one_of(repr(name), TRACKERS)}; your own is module:name")
    chosen: dict[str, dict[str, Any]] = {"tensorboard": {}} if tensorboard else {}
    if wandb is not None:
        if "wandb" in trackers:
            raise ValueError("wandb and trackers.wandb are the same tracker: give one of them")
        chosen["wandb"] = {"project": wandb.project, "mode": wandb.mode}
    return chosen | dict(trackers)
