"""Paths of experiment files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_cli.experiment import locate


@pytest.mark.parametrize(
    "named", [".", "..", "", "folder", "folder/", "folder/experiment.yaml", "other"]
)
def test_an_experiment_is_a_file_or_a_folder_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    inner = tmp_path / "folder"
    inner.mkdir()
    for path in (tmp_path / "experiment.yaml", inner / "experiment.yaml", tmp_path / "other.yaml"):
        path.write_text("exp_name: x\n")
    monkeypatch.chdir(inner if named == ".." else tmp_path)
    expected = {
        "folder": "folder/experiment.yaml",
        "other": "other.yaml",
    }.get(named.split("/")[0], "experiment.yaml")
    assert locate(named, None, None).resolve() == tmp_path / expected


def test_an_experiment_that_is_not_there_is_a_mistake_with_the_places_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no experiment file at \.: looked for \., experiment\.yaml"):
        locate(".", None, None)
