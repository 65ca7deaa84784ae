"""Metrics for tensorboard, under `<run_dir>/tensorboard/`."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorboardWriter:
    """Writes the numbers of each step; steps beyond a resume are hidden from view."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step, flush_secs=10)

    def write(self, step: int, metrics: dict[str, float | None]) -> None:
        """Write what is known; unknown values leave a gap."""
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    async def close(self) -> None:
        """Flush."""
        self._writer.close()
