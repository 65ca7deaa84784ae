"""Trackers by name: those in the box, a user's own, and what is refused at the start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tailrace.config import ConfigError, RunConfig
from tailrace_learner.adapters.trackers import tracker_makers
from tailrace_learner.adapters.trackers.feed import TrackerFeed
from tailrace_learner.adapters.trackers.row_file import RowFile
from tailrace_learner.config import LearnerConfig
from tests.unit.tailrace_learner.trackers.run_files import RunFiles

OWN = """
class Plot:
    def __init__(self, run, *, path: str, scale: float = 1.0):
        self.file = open(path, "w")
        self.scale = scale
        self.file.write(run.exp_name + "\\n")

    def write(self, row):
        self.file.write(f"{row['step']} {self.scale * row['policy_version']:g}\\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()

class Typed(Plot):
    def __init__(self, run: "RunConfig", *, path: str, scale: float = 1.0, colour: "Colour" = ""):
        super().__init__(run, path=path, scale=scale)

class NoFlush:
    def __init__(self, run): ...
    def write(self, row): ...
    def close(self): ...

class WritesNothing(NoFlush):
    def write(self): ...
    def flush(self): ...
"""


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path / "unit")
    files.first_run()
    return files


@pytest.fixture
def own_module(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module outside of the repository."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "my_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_trackers", raising=False)
    return "my_trackers"


def fed(files: RunFiles, name: str, arguments: dict[str, Any]) -> None:
    run = RunConfig(exp_name="unit", output_dir=str(files.run_dir.parent))
    make = tracker_makers(run, {name: arguments})[name]
    feed = TrackerFeed(name, make, RowFile(files.run_dir / "metrics.jsonl"), 3)
    assert feed.deliver()
    feed._close_tracker()


def test_json_lines_are_the_rows_with_the_name_of_the_run(files: RunFiles, tmp_path: Path) -> None:
    fed(files, "jsonl", {"path": str(tmp_path / "all" / "{exp_name}.jsonl")})
    lines = (tmp_path / "all" / "unit.jsonl").read_text().splitlines()
    rows = (files.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"exp_name": "unit"} | json.loads(r) for r in rows]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"keys": ["loss", "kl"]}, {"loss"}),
        ({}, {"loss", "eval/success_rate"}),
        ({"keys": ["*"]}, {"policy_version", "tag/lake/reward_mean", "idle/credit"}),
    ],
)
def test_the_console_shows_the_known_numbers_among_its_keys(
    files: RunFiles, arguments: dict[str, Any], shown: set[str]
) -> None:
    with capture_logs() as logs:
        fed(files, "console", arguments)
    last = logs[-1]
    assert (last["event"], last["step"], last["loss"]) == ("metrics", 3, 6.5)
    assert shown <= last.keys()
    assert "kl" not in last


@pytest.mark.parametrize("name", ["Plot", "Typed"])  # the latter has types for type checkers alone
def test_a_class_of_a_users_file_is_a_tracker(
    name: str, files: RunFiles, own_module: str, tmp_path: Path
) -> None:
    fed(files, f"{own_module}:{name}", {"path": str(tmp_path / "plot"), "scale": 2})
    assert (tmp_path / "plot").read_text() == "unit\n0 20\n1 22\n2 24\n3 26\n"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("my_trackers:Nothing", {}, "has no 'Nothing'"),
        ("my_tracker:Plot", {}, "cannot import 'my_tracker'"),
        ("my_trackers:NoFlush", {}, "NoFlush has no method flush"),
        ("my_trackers:WritesNothing", {}, r"a tracker needs def write\(self, row\)"),
        ("my_trackers:Plot", {}, r"Plot\.path is missing"),
        ("my_trackers:Plot", {"path": "p", "scala": 1.0}, "did you mean 'scale'"),
        ("my_trackers:Plot", {"path": "p", "scale": "big"}, r"scale: Expected `float`, got `str`"),
        ("my_trackers:Typed", {"path": "p", "colour": "red"}, "colour: .*'Colour' is not defined"),
        ("wandb", {"project": "p", "mode": "often"}, r"learner\.trackers\.wandb\.mode: Invalid enum"),
        ("tensorboard", {"folder": "f"}, "takes no such argument: it takes none"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_at_the_start(
    name: str, arguments: dict[str, Any], message: str, own_module: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tracker_makers(RunConfig(exp_name="unit"), {name: arguments})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace_learner.adapters.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs mlflow: pip install 'tailrace\[mlflow\]'"):
        tracker_makers(RunConfig(exp_name="unit"), {"mlflow": {}})


def test_the_old_keys_and_the_new_one_choose_trackers_together() -> None:
    config = msgspec.convert(
        {"wandb": {"project": "lakes"}, "trackers": {"console": {}, "my:Plot": {"path": "p"}}},
        LearnerConfig,
    )
    assert config.chosen_trackers == {
        "tensorboard": {},
        "wandb": {"project": "lakes", "mode": "offline"},
        "console": {},
        "my:Plot": {"path": "p"},
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trackers": {"tensorbord": {}}}, "did you mean 'tensorboard'"),
        ({"trackers": {"wandb": {}}, "wandb": {"project": "p"}}, "give one of them"),
    ],
)
def test_unknown_and_repeated_trackers_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, LearnerConfig)
