"""Rows for Weights & Biases, under `<run_dir>/wandb/`."""

import os
from typing import Any, ClassVar, Literal

from tailrace.config import RunConfig
from tailrace.import_path import load_extra
from tailrace_learner.ports import MetricsRow, known_numbers


class WandbTracker:
    """A W&B run with all rows from the first on.

    W&B does not take an earlier step again: a learner that resumes begins another run of the same name
    and group.
    """

    package: ClassVar[str] = "wandb"

    def __init__(
        self, run: RunConfig, *, project: str, mode: Literal["offline", "online"] = "offline"
    ) -> None:
        wandb = load_extra("wandb", "wandb", "learner.wandb")
        if mode == "offline":  # otherwise the package reports its own use over the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # `create_new`: a tracker that failed may have left its run open.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, reinit="create_new")
        self._run: Any = wandb.init(
            project=project,
            name=run.exp_name,
            group=run.exp_name,
            mode=mode,
            dir=run.run_dir,
            settings=settings,
        )

    def write(self, row: MetricsRow) -> None:
        """Write the known numbers; an unknown value leaves a gap."""
        step, numbers = known_numbers(row)
        self._run.log(numbers, step=step)

    def flush(self) -> None:
        """Do nothing: a process of W&B has the rows and writes them."""

    def close(self) -> None:
        """Return once W&B has written or sent all rows."""
        self._run.finish()
