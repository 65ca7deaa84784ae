"""Metrics for Weights & Biases, under `<run_dir>/wandb/`: a convenience that never stops the run."""

from __future__ import annotations

import asyncio
from typing import Any

from tailrace.config import ConfigError, RunConfig
from tailrace.log import get_logger
from tailrace_learner.config_execution import WandbArgs

log = get_logger(__name__)


class WandbWriter:
    """Writes the numbers of each step; a learner that resumes begins another file.

    What is not taken is missing there; `metrics.jsonl` has it. `ConfigError` without the package.
    """

    def __init__(self, args: WandbArgs, run: RunConfig) -> None:
        try:
            import wandb  # an extra: who does not track there does without it
        except ImportError as error:
            raise ConfigError("learner.wandb needs wandb: pip install 'tailrace[wandb]'") from error
        self._errors: tuple[type[Exception], ...] = (wandb.Error, OSError)
        self._run: Any = None
        run.run_dir.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        try:
            self._run = wandb.init(
                project=args.project,
                name=run.exp_name,
                group=run.exp_name,
                mode=args.mode,
                dir=run.run_dir,
                settings=settings,
            )
        except self._errors as error:
            self._say(error)

    def write(self, step: int, metrics: dict[str, float | None]) -> None:
        """Write what is known; unknown values leave a gap."""
        if self._run is None:
            return
        known = {name: value for name, value in metrics.items() if value is not None}
        try:
            self._run.log(known, step=step)
        except self._errors as error:
            self._say(error)

    async def close(self) -> None:
        """Flush."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            await asyncio.to_thread(run.finish)
        except self._errors as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        self._run = None
        remedy = "free space on the disk of output_dir, or set learner.wandb.mode to offline"
        log.error("wandb not written", error=str(error), remedy=remedy)
