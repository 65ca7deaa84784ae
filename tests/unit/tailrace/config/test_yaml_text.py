"""YAML of users: aliases work, and do not grow to gigabytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tailrace.config import ConfigError
from tailrace.config.experiment import load_experiment
from tailrace.config.yaml_text import load_yaml
from tailrace_cli.experiment import compose_file
from tailrace_protos.subjects import check_run_name

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
HOSTILE = {"growing": BOMB, "of itself": "a: &a [*a]", "deep": "[" * 5000 + "]" * 5000}


def test_ordinary_aliases_and_merges_are_read() -> None:
    text = "base: &b {x: 1, y: [2]}\none: {<<: *b, z: 3}\ntwo: *b\n"
    assert load_yaml(text)["one"] == {"x": 1, "y": [2], "z": 3}
    assert load_yaml("") is None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_that_grows_beyond_all_bounds_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=r"alias|deep"):
        load_yaml(HOSTILE[name])
    path = tmp_path / "experiment.yaml"
    path.write_text(HOSTILE[name])
    with pytest.raises(ConfigError, match=r"experiment\.yaml"):
        load_experiment(path)
    with pytest.raises(ConfigError, match=r"experiment\.yaml"):
        compose_file(path)


@pytest.mark.parametrize("value", ["1" * 8000, "2026-02-30"])
def test_a_value_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(f"exp_name: {value}\n")
    with pytest.raises(yaml.YAMLError):
        load_yaml(path.read_text())
    with pytest.raises(ConfigError, match=r"experiment\.yaml"):
        load_experiment(path)


def test_a_number_of_too_many_digits_is_refused_by_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("max_steps: " + "1" * 8000)
    with pytest.raises(ConfigError, match=r"experiment\.yaml"):
        compose_file(path)


@pytest.mark.parametrize("name", ["abc\n", "abc\n\n", "a b", "", "a.b", "\u00e4"])
def test_a_runs_name_matches_to_its_end(name: str) -> None:
    with pytest.raises(ValueError, match="exp_name"):
        check_run_name(name)
