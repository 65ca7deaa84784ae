"""A mistake of a user ends with exit code 2 and one line with the mistake, its place and the remedy."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.runs import EXPERIMENT, TAILRACE, command, run

SOON_S = 300.0  # to end a run in which nothing can succeed


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_step=3", ["max_step", "did you mean 'max_steps'", "experiment.yaml"]),
        ("learner.learning_rat=3", ["learner.learning_rat", "did you mean"]),
        ("schedular.eval_groups=3", ["did you mean 'scheduler'"]),
        ("pretrain=/no/such/model", ["/no/such/model", "no model directory"]),
        ("resume_from_checkpoint=/no/such/checkpoint", ["run_state.json"]),
        ("exp_name='a b'", ["cannot name subjects"]),
        ("scheduler.max_buffered_groups=1", ["max_buffered_groups", "groups_per_step"]),
        ("scheduler.tags=[lava_lake]", ["lava_lake", "custom_envs"]),
        ("max_steps=many", ["max_steps", "int"]),
        ("cluster.num_agents_workers=0", ["num_agents_workers"]),
        ("nonsense", ["key=value"]),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    tmp_path: Path, override: str, expected: list[str]
) -> None:
    result = run(command("validate", override, "--fast", output_dir=tmp_path, exp_name="wrong"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert all(part in result.stderr for part in expected), result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_missing_experiment_names_where_it_was_looked_for() -> None:
    result = run([TAILRACE, "train", "no/such/experiment"])
    assert result.returncode == 2
    assert "no/such/experiment" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_validate_prints_what_the_experiment_resolves_to() -> None:
    result = run([TAILRACE, "validate", str(EXPERIMENT), "group_size=5", "--print", "--fast"])
    assert result.returncode == 0, result.stdout
    assert "group_size: 5" in result.stdout
    assert "valid" in result.stderr.splitlines()[-1]


def test_what_an_experiment_names_is_loaded_before_anything_starts(tmp_path: Path) -> None:
    valid = run([TAILRACE, "validate", str(EXPERIMENT)])
    assert valid.returncode == 0, valid.stdout + valid.stderr
    assert "qwen3 from scratch" in valid.stdout
    assert "valid" in valid.stdout.splitlines()[-1]
    assert len(valid.stdout.splitlines()) < 12
    wrong = (
        "agents.custom_envs.frozen_lake.env_type=my_enviroment:Lake",
        "learner.warm_start.demonstrations=tailrace_envs.frozen_lake_expert:demonstration",
        "inference.max_model_len=0",
        "agents.max_episode_tokens=300",
    )
    result = run(command("train", *wrong, output_dir=tmp_path, exp_name="wrong"), SOON_S)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "3 problems:" in result.stderr
    assert "agents.custom_envs.frozen_lake: " in result.stderr
    assert "No module named 'my_enviroment'" in result.stderr
    assert "did you mean 'demonstrations'" in result.stderr
    assert "agents.max_episode_tokens: 300 is more than the context" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert not (tmp_path / "wrong").exists()


def test_rows_that_nothing_scores_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Twice 21?", "answer": "42"}\n')
    unscored = (
        f"+agents.datasets.sums={{path: {tmp_path / 'rows.jsonl'}}}",
        "scheduler.tags=[sums]",
        "scheduler.eval_tags=[sums]",
        "reward.rewards=[]",
    )
    result = run(command("train", *unscored, output_dir=tmp_path, exp_name="unscored"), SOON_S)
    assert result.returncode == 2, result.stdout + result.stderr
    said = " ".join(result.stderr.split())
    assert "reward.rewards: nothing scores the rows of agents.datasets.sums" in said
    assert "name a reward (a scorer, function, model or judge)" in said
    assert "Traceback" not in result.stdout + result.stderr
    assert not (tmp_path / "unscored").exists()


def test_a_busy_port_is_named_with_its_key(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        argv = command("train", f"cluster.nats_port={port}", output_dir=tmp_path, exp_name="busy")
        result = run(argv)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"port {port} (cluster.nats_port) is busy" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_an_unusable_output_dir_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    result = run(command("train", output_dir=tmp_path / "file", exp_name="nowhere"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "choose another output_dir" in result.stderr.replace("\n", " ")


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "events.jsonl").write_text("")
    result = run(command("train", output_dir=tmp_path, exp_name="old"))
    assert result.returncode == 2
    assert "--overwrite" in result.stderr
    assert (tmp_path / "old" / "events.jsonl").exists()


def test_a_run_to_continue_that_never_was_is_refused_before_anything_starts(tmp_path: Path) -> None:
    argv = command("train", "resume_from_checkpoint=true", output_dir=tmp_path, exp_name="typo")
    result = run(argv)
    assert result.returncode == 2
    assert "holds no run: correct exp_name" in result.stderr
    assert not (tmp_path / "typo").exists()


def test_overwrite_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    argv = command("train", output_dir=tmp_path, exp_name="photos")
    result = run([*argv, "--overwrite"])
    assert result.returncode == 2
    assert (tmp_path / "photos" / "cat.png").exists()


def test_explain_prints_a_key_and_names_the_nearest_of_an_unknown_one() -> None:
    known = run([TAILRACE, "explain", "learner.gamma"])
    assert known.returncode == 0, known.stdout
    assert "read by: learner" in known.stdout
    unknown = run([TAILRACE, "explain", "learner.gama"])
    assert unknown.returncode == 2
    assert "error: unknown key 'learner.gama'; did you mean learner.gamma" in unknown.stderr


def test_all_mistakes_in_an_experiment_are_named_at_once(tmp_path: Path) -> None:
    wrong = ("learner.gama=1", "max_step=3")
    result = run(command("validate", *wrong, output_dir=tmp_path, exp_name="wrong"))
    assert result.returncode == 2
    assert "2 problems:" in result.stderr
    assert "'max_step'; did you mean" in result.stderr
    assert "'learner.gama'; did you mean" in result.stderr
