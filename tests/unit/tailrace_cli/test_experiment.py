"""Paths of experiment files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_cli.experiment import composed, locate


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


@pytest.mark.parametrize(
    ("named", "example"),
    [
        ("examples/calculator", "calculator"),
        ("examples/gsm8k/tiny.yaml", "gsm8k"),
        ("examples/frameworks/openai_sdk/", "frameworks/openai_sdk"),
    ],
)
def test_an_example_of_a_page_is_copied_where_there_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, example: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"`tailrace init {example}` copies an example"):
        locate(named, None, None)
    (tmp_path / "examples").mkdir()
    with pytest.raises(ConfigError) as refused:
        locate(named, None, None)
    assert "init" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("nonsense", "'nonsense' is not of the form key=value"),
        ("=4", "'=4' is not of the form key=value"),
        ("pretrain=~/models/x", "needs quotes of its own: 'pretrain=\"~/models/x\"'"),
        ("agents.tools=[a, f(x)]", "needs quotes inside the brackets"),
        ("agents.tool=f(x)", "'agents.tool=f(x)' cannot be read: values are written as in YAML"),
        ("seed=1,2", "which only `tailrace train` takes: give one, or a list: 'seed=[1,2]'"),
        ("policy=3", "policy is a folder of files to choose from"),
    ],
)
def test_an_override_that_cannot_be_read_is_shown_as_it_was_given_with_the_remedy(
    tmp_path: Path, override: str, told: str
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "experiment.yaml").write_text("exp_name: x\n")
    with pytest.raises(ConfigError) as refused:
        composed(tmp_path / "experiment.yaml", [override])
    assert told in str(refused.value)
    assert not {"++", "hydra.cc", "multirun"} & set(str(refused.value).split())


def test_an_override_sets_changes_and_removes_keys(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("exp_name: x\nseed: 1\nlearner: {loss: dapo, gamma: 0.9}\n")
    assert composed(path, ["~learner.loss", "seed=2", "pretrain='~/models/x'", "agents.x=[a, b]"]) == {
        "exp_name": "x",
        "seed": 2,
        "learner": {"gamma": 0.9},
        "pretrain": "~/models/x",
        "agents": {"x": ["a", "b"]},
    }


def test_files_are_composed_as_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text()
    mine = re.search(r"^```\n(# mine\.yaml\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    careful = re.search(r"^```yaml\n(# @package _global_\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert mine
    assert careful
    (tmp_path / "policy").mkdir()
    (tmp_path / "base.yaml").write_text("exp_name: base\nmax_steps: 1\nlearner: {pg_clip: 0.3}\n")
    (tmp_path / "mine.yaml").write_text(mine[1])
    for name in ("careful", "bold"):
        (tmp_path / "policy" / f"{name}.yaml").write_text(careful[1].replace("0.1", f"0.{len(name)}"))
    found = composed(tmp_path / "mine.yaml", ["policy=bold"])
    assert (found["exp_name"], found["max_steps"], found["learner"]["pg_clip"]) == ("mine", 50, 0.4)
    with pytest.raises(ConfigError, match=r"Could not find 'policy/brave'.*bold careful$"):
        composed(tmp_path / "mine.yaml", ["policy=brave"])


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{path}: it, or a file of its defaults, is no text"):
        composed(path, [])
