"""Rows for Weights & Biases, under `<run_dir>/wandb/`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from tailrace.config import ConfigError, RunConfig
from tailrace_learner.config_execution import WandbArgs
from tailrace_learner.ports import Row, TrackerError, known_numbers


def check_wandb() -> None:
    """`ConfigError` without the package."""
    if find_spec("wandb") is None:
        raise ConfigError("learner.wandb needs wandb: pip install 'tailrace[wandb]'")


class WandbWriter:
    """A W&B run with all rows from the first on; `TrackerError` where W&B does not take them.

    W&B takes no step back: a learner that resumes begins another run of the same name and group.
    """

    def __init__(self, args: WandbArgs, run: RunConfig) -> None:
        import wandb  # an extra: who does not track there does without it

        if args.mode == "offline":  # else the package sends reports of its own use all the same
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._error = wandb.Error
        # A run of its own, also where one before it failed and is still open.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, reinit="create_new")
        try:
            self._run: Any = wandb.init(
                project=args.project,
                name=run.exp_name,
                group=run.exp_name,
                mode=args.mode,
                dir=run.run_dir,
                settings=settings,
            )
        except self._error as error:
            raise TrackerError(str(error)) from error

    def write(self, row: Row) -> None:
        """Write what is known; unknown values leave a gap."""
        step, numbers = known_numbers(row)
        try:
            self._run.log(numbers, step=step)
        except self._error as error:
            raise TrackerError(str(error)) from error

    def flush(self) -> None:
        """W&B's own process has the rows and writes them."""

    def close(self) -> None:
        """Return once all of it is written, or sent."""
        try:
            self._run.finish()
        except self._error as error:
            raise TrackerError(str(error)) from error
