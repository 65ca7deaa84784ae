"""Rows as JSON lines in a file of the user's choice, for example on a shared disk."""

import os
from pathlib import Path

import msgspec

from tailrace.config import RunConfig
from tailrace_learner.ports import MetricsRow


class JsonLinesTracker:
    """Writes one object per step: the row of `metrics.jsonl` and the run's name under `exp_name`.

    `path` may contain `{exp_name}`. A tracker that begins again writes the file anew.
    """

    def __init__(self, run: RunConfig, *, path: str) -> None:
        target = Path(os.path.expanduser(path.replace("{exp_name}", run.exp_name)))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._name = run.exp_name
        self._file = target.open("wb")

    def write(self, row: MetricsRow) -> None:
        """Write the row, unknown values as null."""
        self._file.write(msgspec.json.encode({"exp_name": self._name, **row}) + b"\n")

    def flush(self) -> None:
        """Return once all rows are in the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
