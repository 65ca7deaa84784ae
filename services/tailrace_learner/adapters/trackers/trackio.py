"""Rows for Trackio: local, on a server of one's own, or in a Space of Hugging Face."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from tailrace.config import RunConfig
from tailrace.import_path import load_extra
from tailrace_learner.ports import MetricsRow, known_numbers


class TrackioTracker:
    """A Trackio run with all rows from the first on; a learner that resumes begins another one.

    Without `space_id` and `server_url` the rows are in the folder that `TRACKIO_DIR` names, by default
    `<output_dir>/trackio`.
    """

    package: ClassVar[str] = "trackio"

    def __init__(
        self,
        run: RunConfig,
        *,
        project: str = "tailrace",
        space_id: str | None = None,
        server_url: str | None = None,
    ) -> None:
        # Trackio reads the variable when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(Path(run.output_dir).absolute() / "trackio"))
        trackio = load_extra("trackio", "trackio", "learner.trackers.trackio")
        with redirect_stdout(sys.stderr):  # it prints advice; stdout is the log
            self._run: Any = trackio.init(
                project=project,
                name=run.exp_name,
                group=run.exp_name,
                space_id=space_id,
                server_url=server_url,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, row: MetricsRow) -> None:
        """Give Trackio the known numbers."""
        step, numbers = known_numbers(row)
        self._run.log(numbers, step=step)

    def flush(self) -> None:
        """Do nothing: Trackio's own thread writes the rows."""

    def close(self) -> None:
        """Return once Trackio has written or sent all rows."""
        with redirect_stdout(sys.stderr):
            self._run.finish()
