"""Success rates that `tailrace eval` prints, and evaluations that measured nothing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tailrace_cli.commands.evaluate import report_rates
from tailrace_cli.exit_codes import RunEndedError
from tailrace_cli.experiment import Experiment, load
from tailrace_protos.episode import Outcome
from tailrace_protos.event import Event
from tests.unit.tailrace_scheduler.simulation import made_settlement

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
EVALUATIONS = "{near: {tag: frozen_lake, num_tasks: 2}, far: {tag: frozen_lake, num_tasks: 2}}"


def evaluated(folder: Path, **success: float | None) -> Experiment:
    """An evaluation that has ended with these success rates and one failure."""
    overrides = [f"output_dir={folder}", "scheduler.eval_tags=[]", f"evaluations={EVALUATIONS}"]
    experiment = load(EXAMPLE, overrides)
    run_dir = experiment.run.run_dir
    run_dir.mkdir(parents=True)
    rates = {f"eval/tag/{name}/success_rate": rate for name, rate in success.items()}
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 0, **rates}) + "\n")
    failure = msgspec.structs.replace(made_settlement("e0", 1, Outcome.INFRA_FAILURE), reason="lost")
    event = Event("1-1", 0.0, "agents", failure)
    (run_dir / "events.jsonl").write_bytes(msgspec.json.encode(event) + b"\n")
    return experiment


def test_rates_of_all_evaluations_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_rates(evaluated(tmp_path, near=0.5, far=0.0))
    printed = capsys.readouterr().out
    assert "success rate: 0.5000 (near, " in printed
    assert "success rate: 0.0000 (far, " in printed


def test_an_evaluation_without_a_valid_episode_is_an_error_after_the_rates_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunEndedError, match=r"evaluations\.far: no episode was valid; 1 .*: lost"):
        report_rates(evaluated(tmp_path, near=0.5, far=None))
    printed = capsys.readouterr().out
    assert "success rate: 0.5000 (near, " in printed
    assert "success rate: - (far, " in printed
