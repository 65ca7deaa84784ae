"""The GSM8K example on the real files, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.data import Dataset, load_dataset, prompt_messages
from tailrace.scorers import scorer_for
from tailrace.scorers.registry import score
from tailrace_cli import experiment as experiments
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("TAILRACE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))


def load(file: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    if not (FOLDER / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K files in {FOLDER}: name their folder in TAILRACE_GSM8K")
    monkeypatch.setenv("TAILRACE_GSM8K", str(FOLDER))
    experiment = experiments.load(ROOT / "examples" / "gsm8k" / file)
    return load_dataset(experiment.agents.datasets[tag], 1, f"agents.datasets.{tag}")


def test_every_question_becomes_a_row_that_its_scorer_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify", reason="the package math-verify is not installed")
    for tag, num_rows in (("gsm8k_test", 1319), ("gsm8k", 7473)):
        dataset = load("experiment.yaml", tag, monkeypatch)
        assert len(dataset) == num_rows
        for row in dataset.rows[:200]:
            assert row.data["agent_name"] == "single_turn_agent"
            assert scorer_for(row.data["data_source"], {}) == "gsm8k"
            (message,) = prompt_messages(row.data)
            assert message.content.endswith("in \\boxed{}.")
            assert answered(row.data, row.data["answer"]) == 1.0
            assert answered(row.data, "\\boxed{-77}") == 0.0


def answered(row: dict[str, Any], reply: str) -> float:
    return score(EnvTask("gsm8k", 0, 0, row), [ChatMessage("assistant", reply)], {}, scorer="gsm8k")


def test_the_tool_variant_names_agent_and_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    row = load("calculator.yaml", "gsm8k_test", monkeypatch).eval_row(0).data
    assert (row["agent_name"], row["tools"]) == ("tool_agent", ["calculator"])
    (message,) = prompt_messages(row)
    assert message.content.startswith("Janet")
    assert "use the calculator" in message.content


def test_every_experiment_reads_the_folder_that_the_variable_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The README promises it."""
    monkeypatch.setenv("TAILRACE_GSM8K", str(tmp_path))
    for path in (ROOT / "examples" / "gsm8k").glob("*.yaml"):
        content = experiments.composed(path, ())
        agents = content["agents"]
        entries = [*agents.get("datasets", {}).values()]
        entries += [env["env_config"]["dataset"] for env in agents.get("custom_envs", {}).values()]
        assert {entry["path"] for entry in entries} == {str(tmp_path)}, path.name


@pytest.mark.parametrize(
    ("reply", "expected"), [("42", 0.0), ("a4b2", -0.5), ("no idea", -1.0), ("", -1.0)]
)
def test_what_is_no_digit_is_chatter(
    monkeypatch: pytest.MonkeyPatch, reply: str, expected: float
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "gsm8k")
    import gsm8k

    assert gsm8k.chatter(EnvTask("gsm8k", 0), [ChatMessage("assistant", reply)], {}) == expected
