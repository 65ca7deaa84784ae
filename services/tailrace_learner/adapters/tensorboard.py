"""Metrics for tensorboard, under `<run_dir>/tensorboard/`: a convenience that never stops the run."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from tailrace.log import get_logger

log = get_logger(__name__)


class TensorboardWriter:
    """Writes the numbers of each step; steps beyond a resume are hidden from view.

    What a full disk does not take is missing there; `metrics.jsonl` has it.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._folder = run_dir / "tensorboard"
        self._first_step = first_step
        self._writer: SummaryWriter | None = None
        self._open()

    def write(self, step: int, metrics: dict[str, float | None]) -> None:
        """Write what is known; unknown values leave a gap."""
        if self._writer is None:
            self._open()
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        except OSError as error:  # raised by every later write as well: it needs a new file
            self._writer = None
            self._say(error)

    async def close(self) -> None:
        """Flush."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._say(error)

    def _open(self) -> None:
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step, flush_secs=10)
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        remedy = "free space on the disk of output_dir"
        log.error("tensorboard not written", error=str(error), remedy=remedy)
