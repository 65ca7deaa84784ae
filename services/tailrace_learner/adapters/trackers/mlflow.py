"""Rows for MLflow: on a tracking server, or in a SQLite file beside the run directories."""

import os
import re
from pathlib import Path
from typing import Any, ClassVar

from tailrace.config import RunConfig
from tailrace.import_path import load_extra
from tailrace.sqlite_files import made_by_one
from tailrace_learner.adapters.trackers.row_file import run_start_unix_s
from tailrace_learner.ports import MetricsRow, known_numbers

_MAX_BATCH = 1000  # metrics that a tracking server takes at once
_REFUSED = re.compile(r"[^\w./ -]")  # in names of metrics


class MlflowTracker:
    """An MLflow run with all rows from the first on; a learner that resumes begins another one.

    `tracking_uri` is empty for the variable `MLFLOW_TRACKING_URI`, and without that for
    `<output_dir>/mlflow.db`.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(self, run: RunConfig, *, tracking_uri: str = "", experiment: str = "tailrace") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = load_extra("mlflow", "mlflow", "learner.trackers.mlflow")
        entities = load_extra("mlflow.entities", "mlflow", "learner.trackers.mlflow")
        output_dir = Path(run.output_dir).absolute()
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{output_dir / 'mlflow.db'}"
        self._make_metric: Any = entities.Metric
        self._started_unix_s = run_start_unix_s(run.run_dir)
        with made_by_one(uri):  # traces of the agents may go there too
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(experiment)
            experiment_id = (
                self._client.create_experiment(experiment, artifact_location=str(output_dir / "mlflow"))
                if known is None
                else known.experiment_id
            )
        self._run_id = self._client.create_run(experiment_id, run_name=run.exp_name).info.run_id
        self._waiting: list[Any] = []

    def write(self, row: MetricsRow) -> None:
        """Take the known numbers, at the time when their step ended."""
        step, numbers = known_numbers(row)
        time_ms = round(1000 * (self._started_unix_s + numbers["time_s"]))
        for key, number in numbers.items():
            self._waiting.append(self._make_metric(_REFUSED.sub("_", key), number, time_ms, step))

    def flush(self) -> None:
        """Return once MLflow has all numbers."""
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:_MAX_BATCH])
            del self._waiting[:_MAX_BATCH]

    def close(self) -> None:
        """Flush, and mark the run as finished."""
        self.flush()
        self._client.set_terminated(self._run_id)
