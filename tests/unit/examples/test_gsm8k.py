"""The GSM8K example on the real files, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.data import Dataset, DatasetEntry, load_dataset, prompt_messages
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("TAILRACE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))


@pytest.fixture
def gsm8k(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("math_verify", reason="the package math-verify is not installed")
    monkeypatch.syspath_prepend(ROOT / "examples" / "gsm8k")
    import gsm8k

    return gsm8k


def load(converter: str, split: str = "test") -> Dataset:
    if not (FOLDER / f"{split}.jsonl").is_file():
        pytest.skip(f"no GSM8K files in {FOLDER}: name their folder in TAILRACE_GSM8K")
    entry = DatasetEntry(path=str(FOLDER), split=split, converter=f"gsm8k:{converter}")
    return load_dataset(entry, 1, "agents.datasets.gsm8k")


def score(gsm8k: Any, row: dict[str, Any], reply: str) -> float:
    task = EnvTask("gsm8k", 0, 0, row)
    return float(gsm8k.correct(task, [ChatMessage("assistant", reply)], {}))


def test_every_question_becomes_a_row_with_a_number(gsm8k: Any) -> None:
    for split, num_rows in (("test", 1319), ("train", 7473)):
        dataset = load("single_turn_row", split)
        assert len(dataset) == num_rows
        for row in dataset.rows:
            assert row.data["agent_name"] == "single_turn_agent"
            assert float(row.data["reward_model"]["ground_truth"]) is not None
            assert "####" not in row.data["solution"]


def test_the_tool_variant_names_agent_and_tool(gsm8k: Any) -> None:
    row = load("calculator_row").eval_row(0).data
    assert (row["agent_name"], row["tools"]) == ("tool_agent", ["calculator"])
    (message,) = prompt_messages(row)
    assert message.content.startswith("Janet")
    assert "calculator" in message.content


def test_the_data_sets_own_solutions_are_right_and_wrong_numbers_are_not(gsm8k: Any) -> None:
    dataset = load("single_turn_row")
    for row in dataset.rows[:60]:
        truth = row.data["reward_model"]["ground_truth"]
        assert score(gsm8k, row.data, f"{row.data['solution']}\n#### {truth}") == 1.0
        assert score(gsm8k, row.data, f"{row.data['solution']} \\boxed{{{truth}}}") == 1.0
        assert score(gsm8k, row.data, f"\\boxed{{{int(truth) + 1}}}") == 0.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("so \\boxed{70,000} dollars", 1.0),
        ("\\boxed{70000.0}", 1.0),
        ("#### 70,000", 1.0),
        ("The answer is 70000.", 1.0),
        ("70001", 0.0),
        ("", 0.0),
        ("no idea", 0.0),
    ],
)
def test_numbers_are_compared_however_they_are_written(gsm8k: Any, reply: str, expected: float) -> None:
    assert score(gsm8k, {"reward_model": {"ground_truth": "70000"}}, reply) == expected


def test_a_row_in_another_form_is_named(gsm8k: Any, tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    entry = DatasetEntry(path=str(path), converter="gsm8k:single_turn_row")
    with pytest.raises(ConfigError, match=r"test\.jsonl:1: .*'answer' has no line"):
        load_dataset(entry, 1, "agents.datasets.gsm8k")


@pytest.mark.parametrize(
    ("reply", "expected"), [("42", 0.0), ("a4b2", -0.5), ("no idea", -1.0), ("", -1.0)]
)
def test_what_is_no_digit_is_chatter(gsm8k: Any, reply: str, expected: float) -> None:
    assert gsm8k.chatter(EnvTask("gsm8k", 0), [ChatMessage("assistant", reply)], {}) == expected
