"""MLflow and Trackio get every known number, by the real packages; `make test-trackers`."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tailrace_learner.trackers.run_files import RunFiles

FEED = """
import asyncio, json, sys
from tailrace.config import RunConfig
from tailrace_learner.adapters.trackers import feed as tracker_feed
from tailrace_learner.adapters.trackers import tracker_makers
from tailrace_learner.adapters.trackers.feed import TrackerFeed
from tailrace_learner.adapters.trackers.row_file import RowFile
run = RunConfig(exp_name="unit", output_dir=sys.argv[1])
tracker_feed._CLOSE_S = 60.0  # the import and the first tables may take longer than a run waits
make = tracker_makers(run, {sys.argv[2]: json.loads(sys.argv[3])})[sys.argv[2]]
for step in (2, 9):  # the second learner resumes
    feed = TrackerFeed(sys.argv[2], make, RowFile(run.run_dir / "metrics.jsonl"), step)
    feed.start()
    asyncio.run(feed.close())
"""

Points = Iterable[tuple[str, int, float]]


def needs(package: str) -> Any:
    reason = "make test-trackers installs it in an environment of its own"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path / "unit")
    files.first_run()
    return files


async def feed(files: RunFiles, tracker: str, arguments: str = "{}") -> None:
    """In a process of its own: both packages keep threads and settings."""
    argv = [sys.executable, "-c", FEED, str(files.run_dir.parent), tracker, arguments]
    ended = await asyncio.to_thread(
        subprocess.run, argv, check=False, timeout=200, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "tracker fails" not in ended.stdout
    assert "tracker abandoned" not in ended.stdout


def curves(points: Points) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for key, step, value in sorted(points):
        found.setdefault(key, []).append((step, value))
    return found


@needs("mlflow")
@pytest.mark.parametrize("arguments", ["{}", '{"experiment": "lakes"}'])
async def test_mlflow_has_a_run_per_learner_and_the_last_has_all_rows(
    files: RunFiles, arguments: str
) -> None:
    await feed(files, "mlflow", arguments)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{files.run_dir.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lakes" if "lakes" in arguments else "tailrace")
    second, first = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in (first, second)} == {"unit"}
    assert {run.info.status for run in (first, second)} == {"FINISHED"}
    assert first.data.metrics["policy_version"] == 12.0
    found = [
        (key, point.step, point.value)
        for key in second.data.metrics
        for point in client.get_metric_history(second.info.run_id, key)
    ]
    assert curves(found) == files.curves
    times_ms = [one.timestamp for one in client.get_metric_history(second.info.run_id, "loss")]
    assert times_ms == [1_004_000, 1_007_000, 1_010_000]


@needs("mlflow")
async def test_mlflow_gets_names_that_it_takes(files: RunFiles) -> None:
    rows = files.run_dir / "metrics.jsonl"
    rows.write_text(re.sub(r'"loss"', '"tag/a+b: c/loss"', rows.read_text()))
    await feed(files, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{files.run_dir.parent / 'mlflow.db'}")
    run = client.search_runs(["1"])[0]
    assert run.data.metrics["tag/a_b_ c/loss"] == 6.5


@needs("trackio")
async def test_trackio_has_a_run_per_learner_and_the_last_has_all_rows(files: RunFiles) -> None:
    await feed(files, "trackio", '{"project": "lakes"}')
    (path,) = (files.run_dir.parent / "trackio").glob("lakes*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics").fetchall()
    import orjson

    by_run: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for name, run_id, step, numbers in rows:
        assert name == "unit"
        by_run.setdefault(run_id, []).append((step, orjson.loads(numbers)))
    first, second = sorted(by_run.values(), key=len)
    assert sorted(step for step, _ in first) == [0, 1, 2]
    found = [(key, step, value) for step, numbers in second for key, value in numbers.items()]
    assert curves(found) == files.curves
