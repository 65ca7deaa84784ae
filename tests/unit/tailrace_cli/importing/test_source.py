"""Sources of settings: files with their defaults, lists of `key=value`, and words of a command."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace.config.settings import value_at
from tailrace_cli.__main__ import app
from tailrace_cli.commands.import_config import converted_from
from tailrace_cli.importing.source import read_source

LINES = """\
algorithm.adv_estimator=grpo
data.train_files=$HOME/data/sums.parquet
data.train_batch_size=64
actor_rollout_ref.actor.optim.lr=1e-6
trainer.logger='["console","tensorboard"]'
+trainer.experiment_name="sums"
"""
COPIED = LINES.strip().replace("\n", " \\\n    ")
LIST = yaml.safe_dump(LINES.splitlines())
EXPECTED = {
    "exp_name": "sums",
    "groups_per_step": 64,
    "learner.adv_estimator": "grpo",
    "learner.training_args.learning_rate": 1e-6,
    "learner.tensorboard": True,
}
SCRIPT = """#!/bin/bash
# it's a comment: N=3
MODEL=${MODEL:-"a/b"}; export N=8
files="['/x/one', '/y/two']"
DATA=(
    data.max_prompt_length=512   # tokens
    data.train_files="$files"
)
%s "${DATA[@]}" \\
    model.path=$MODEL rollout.n=$((N / 2)) name="run-${N}" same='${rollout.n}' 2>&1 | cat
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.txt", COPIED), ("run.txt", LINES), ("run.yaml", LINES), ("run.yaml", LIST)],
)
def test_every_way_to_list_overrides_gives_the_same_experiment(
    name: str, text: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    source.write_text(text)
    written, lines, _, _ = converted_from("verl", [str(source)])
    content = yaml.safe_load(written)
    expected = {**EXPECTED, "agents.datasets.train.path": "~/data/sums.parquet"}
    assert {key: value_at(content, key) for key in expected} == expected
    assert not [line for line in lines if line.startswith("not mapped")]


def test_the_words_of_a_command_are_the_same_experiment_again() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", *shlex.split(LINES)]
    written, lines, _, _ = converted_from("verl", words)
    content = yaml.safe_load(written)
    assert {key: value_at(content, key) for key in EXPECTED} == EXPECTED
    assert not [line for line in lines if line.startswith("not mapped")]


def test_a_script_is_read_by_the_shell_that_runs_it(tmp_path: Path) -> None:
    """With `printf` in place of the trainer, it prints the words that the trainer would get."""
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT % "printf '%s\\n'")
    printed = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    listed = tmp_path / "words.txt"
    listed.write_text(printed)
    for words in ([str(listed)], printed.splitlines()):
        source = read_source(words)
        assert source.unread == {}
        assert source.settings == {
            "data": {"max_prompt_length": 512, "train_files": ["/x/one", "/y/two"]},
            "model": {"path": "a/b"},
            "rollout": {"n": 4},
            "name": "run-8",
            "same": 4,
        }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "printf hello"),
        ("run.txt", "#!/bin/sh\necho hello"),
        ("run.txt", f"set -x\npython3 -m verl.trainer.main_ppo \\\n    {COPIED}"),
    ],
)
def test_a_script_as_a_file_is_refused_with_the_remedy(name: str, text: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_text(text)
    with pytest.raises(ConfigError, match=r"is a shell script.* import-config SYSTEM --.*printf"):
        read_source([str(source)])


def test_variables_in_a_list_are_named_by_key(tmp_path: Path) -> None:
    source = tmp_path / "words.txt"
    source.write_text("a=$UNSET\nb=$((2 * 3))\nc=x$(date +%s)\nd=1\ne=`ls`\nf=${HOME}/x\n")
    read = read_source([str(source)])
    assert read.settings == {"d": 1, "f": "~/x"}
    assert set(read.unread) == {"a", "b", "c", "e"}
    assert read.unread["a"].startswith("$UNSET: only a shell")


def test_deletions_sweeps_and_groups_are_told_apart() -> None:
    words = shlex.split("python a.py ~critic ++x.y=[1,2] z='{a: {b: 1}}' s=1,2 group/sub=one h=~/x")
    source = read_source(words)
    assert source.settings == {
        "critic": None,
        "x": {"y": [1, 2]},
        "z": {"a": {"b": 1}},
        "h": "~/x",
    }
    assert set(source.unread) == {"s", "group/sub"}


@pytest.mark.parametrize("option", [["--config", "math.yaml"], ["--config=math.yaml"]])
def test_a_file_among_the_words_is_named_and_a_file_before_them_is_read(
    option: list[str], tmp_path: Path
) -> None:
    call = ["python3", "-m", "areal.launcher.local", "math.py", *option, "gconfig.n_samples=6"]
    written, lines, _, _ = converted_from("areal", call)
    assert yaml.safe_load(written)["group_size"] == 6
    assert (
        "not mapped: --config: math.yaml: its settings are not read: name that file before the words"
        in lines
    )
    file = tmp_path / "math.yaml"
    file.write_text("experiment_name: sums\ngconfig: {n_samples: 4, max_new_tokens: 9}\n")
    written, _, _, _ = converted_from("areal", [str(file), *call])
    content = yaml.safe_load(written)
    assert (content["exp_name"], content["group_size"]) == ("sums", 6)
    assert value_at(content, "agents.generating_args.max_new_tokens") == 9


def test_defaults_of_a_file_in_its_place_are_composed(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "plain.yaml").write_text("adv_estimator: grpo\ngamma: ${discount}\n")
    (tmp_path / "base.yaml").write_text("discount: 0.5\ntrainer: {save_freq: 5, test_freq: 6}\n")
    source = tmp_path / "run.yaml"
    source.write_text("defaults: [base, algorithm: plain, _self_]\ntrainer: {save_freq: 7}\n")
    read = read_source([str(source), "trainer.test_freq=8"])
    assert read.unread == {}
    assert read.settings == {
        "discount": 0.5,
        "trainer": {"save_freq": 7, "test_freq": 8},
        "algorithm": {"adv_estimator": "grpo", "gamma": 0.5},
    }
    assert read.references == {"discount"}


def test_dotted_keys_of_a_file_are_the_sections_that_they_stand_for(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("algorithm.adv_estimator: grpo\nalgorithm: {gamma: 1.0}\n")
    expected: dict[str, Any] = {"algorithm": {"gamma": 1.0, "adv_estimator": "grpo"}}
    assert read_source([str(source)]).settings == expected


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer: {logger: [x]}\ntrainer.logger.a: 1\n", "trainer.logger.a"),
        ("a: {b: {c: 1}}\na.b: [1]\n", "a.b"),
        ("a: [1]\na.b.c: 1\n", "a.b.c"),
    ],
)
def test_a_dotted_key_that_meets_a_list_is_named(text: str, key: str, tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(text)
    read = read_source([str(source)])
    assert list(read.unread) == [key]
    assert read.unread[key].startswith("not read: ")
    assert list(read.settings) == [key.partition(".")[0]]


def test_a_word_that_meets_a_list_is_named() -> None:
    read = read_source(["python3", "a.py", "trainer.logger=[console]", "trainer.logger.a.b=1", "c=1"])
    reason = "not read: a list stands where trainer.logger.a.b needs a section: keep one of both"
    assert read.unread == {"trainer.logger.a.b": reason}
    assert read.settings == {"trainer": {"logger": ["console"]}, "c": 1}


def test_the_command_reads_words_behind_two_dashes() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", *shlex.split(LINES)]
    result = CliRunner().invoke(app, ["import-config", "verl", "--", *words])
    assert result.exit_code == 2  # the words name no reward
    assert yaml.safe_load(result.stdout)["groups_per_step"] == 64


def test_words_without_settings_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="is empty: expected keys"):
        read_source(["python3", "-m", "verl.trainer.main_ppo"])
