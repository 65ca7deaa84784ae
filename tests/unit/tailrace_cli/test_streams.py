"""The two outputs of the command line: results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tailrace_cli.__main__ import app, main
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.experiment import load
from tests.unit.tailrace_cli.test_runs import STARTED, make_run

LAKE = examples_folder() / "frozen_lake"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["status", "nowhere"], "no run 'nowhere'"),
        (["explain", "learner.gama"], "did you mean learner.gamma"),
        (["validate", str(LAKE), "--fast", "group_size=0"], "group_size"),
        (["train", str(LAKE), "--group_size=4"], "write group_size=4"),
        (["import-config", "trl", "x"], "unknown system 'trl'"),
        (["no-such-command"], "No such command"),
    ],
)
def test_an_error_is_no_output(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrace", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in " ".join(err.split())


def test_the_printed_experiment_is_all_of_the_output_and_loads_again(tmp_path: Path) -> None:
    folder = "f" * 200
    words = ["validate", str(LAKE), f"output_dir={folder}", "--print", "--fast"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "valid (keys and values alone)" in result.stderr
    path = tmp_path / "experiment.yaml"
    path.write_text(result.stdout)
    assert yaml.safe_load(result.stdout)["output_dir"] == folder
    given = load(LAKE / "experiment.yaml", [f"output_dir={folder}"])
    assert load(path).to_yaml() == given.to_yaml()


def test_a_run_s_progress_and_notices_are_no_output_and_its_summary_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_others: object) -> None:
        make_run(tmp_path, STARTED)

    monkeypatch.setattr("tailrace_cli.commands.train.run_to_the_end", begin)
    words = ["train", str(examples_folder() / "own_algorithm"), "exp_name=lake"]
    result = CliRunner().invoke(app, [*words, f"output_dir={tmp_path}"], catch_exceptions=False)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "interrupted" not in result.stdout
    assert f"report: {tmp_path / 'lake' / 'report.html'}" in result.stdout.replace("\n", "")
