"""Trainers' command lines: scripts, lines `key=value` and lists of them become the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace_cli.__main__ import app
from tailrace_cli.commands.import_config import import_config
from tailrace_cli.importing.convert import at
from tailrace_cli.importing.reading.source import read_source

LINES = """\
algorithm.adv_estimator=grpo
data.train_files=$HOME/data/sums.parquet
data.train_batch_size=64
actor_rollout_ref.actor.optim.lr=1e-6
trainer.logger='["console","tensorboard"]'
+trainer.experiment_name="sums"
"""
CALL = "set -x\npython3 -m verl.trainer.main_ppo \\\n    " + LINES.strip().replace("\n", " \\\n    ")
LIST = yaml.safe_dump(LINES.splitlines())


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.sh", CALL), ("run.txt", CALL), ("run.txt", LINES), ("run.yaml", LINES), ("run.yaml", LIST)],
)
def test_every_way_to_write_overrides_gives_the_same_experiment(
    name: str, text: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    source.write_text(text)
    written, lines, _ = import_config("verl", source)
    content = yaml.safe_load(written)
    expected = {
        "exp_name": "sums",
        "groups_per_step": 64,
        "learner.adv_estimator": "grpo",
        "learner.training_args.learning_rate": 1e-6,
        "learner.tensorboard": True,
        "agents.datasets.train.path": "~/data/sums.parquet",
    }
    assert {key: at(content, key) for key in expected} == expected
    assert not [line for line in lines if line.startswith("not mapped")]


def of(tmp_path: Path, script: str) -> tuple[dict[str, Any], dict[str, str]]:
    source = tmp_path / "run.sh"
    source.write_text(script)
    return read_source(source)


def test_variables_stand_for_what_the_script_assigns_to_them(tmp_path: Path) -> None:
    settings, unread = of(
        tmp_path,
        """#!/bin/bash
        # it's a comment: N=3
        MODEL=${MODEL:-"a/b"}; export N=8
        files="['/x/one', '$HOME/two']"
        DATA=(
            data.max_prompt_length=512   # tokens
            data.train_files="$files"
        )
        ray job submit -- python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
            model.path=$MODEL rollout.n=${N} name="run-${N}" same='${rollout.n}' 2>&1 | tee log.txt
        """,
    )
    assert unread == {}
    assert settings == {
        "data": {"max_prompt_length": 512, "train_files": ["/x/one", "~/two"]},
        "model": {"path": "a/b"},
        "rollout": {"n": 8},
        "name": "run-8",
        "same": 8,
    }


def test_what_only_a_shell_knows_is_listed_by_key(tmp_path: Path) -> None:
    settings, unread = of(
        tmp_path,
        """
        SIZE=1
        SIZE=2
        torchrun main.py --config-name='megatron.yaml' a=$UNSET b=$((2 * 3)) c="x$(date +%s)" d=$SIZE \\
            e='$kept' "${EXTRA[@]}" $@
        """,
    )
    assert settings == {"e": "$kept"}
    assert set(unread) == {"a", "b", "c", "d", "--config-name", "${EXTRA[@]}", "$@"}
    assert unread["a"].startswith("$UNSET: only a shell")
    assert "megatron.yaml" in unread["--config-name"]


def test_deletions_sweeps_and_groups_are_told_apart(tmp_path: Path) -> None:
    settings, unread = of(
        tmp_path, "python a.py ~critic ++x.y=[1,2] z='{a: {b: 1}}' s=1,2 group/sub=one"
    )
    assert settings == {"critic": None, "x": {"y": [1, 2]}, "z": {"a": {"b": 1}}}
    assert set(unread) == {"s", "group/sub"}


def test_overrides_below_the_end_of_the_call_are_listed(tmp_path: Path) -> None:
    script = "python a.py x.a=1 \\\n  # x.b=2 \\\n  x.c=3 \\\n  x.d=4\n"
    settings, unread = of(tmp_path, script)
    assert settings == {"x": {"a": 1}}
    assert list(unread) == ["x.c", "x.d"]
    assert "outside of the call" in unread["x.c"]


def test_areal_passes_overrides_beside_its_file(tmp_path: Path) -> None:
    source = tmp_path / "run.sh"
    source.write_text(
        "python3 -m areal.launcher.local math.py --config examples/math.yaml gconfig.n_samples=6"
    )
    written, lines, _ = import_config("areal", source)
    assert yaml.safe_load(written)["group_size"] == 6
    assert any(line.startswith("not mapped: --config: examples/math.yaml") for line in lines)


def test_dotted_keys_of_a_file_are_the_sections_that_they_stand_for(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("algorithm.adv_estimator: grpo\nalgorithm: {gamma: 1.0}\n")
    assert read_source(source)[0] == {"algorithm": {"gamma": 1.0, "adv_estimator": "grpo"}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("#!/bin/sh\necho hello", "holds no settings: expected keys"),
        ("python a.py x=1\npython b.py x=2\n", "calls a trainer with overrides 2 times: leave one"),
    ],
)
def test_scripts_without_one_call_of_a_trainer_are_refused(
    text: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        of(tmp_path, text)


def test_the_command_reads_a_script(tmp_path: Path) -> None:
    source = tmp_path / "run.sh"
    source.write_text(CALL)
    result = CliRunner().invoke(app, ["import-config", "verl", str(source)])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["groups_per_step"] == 64
