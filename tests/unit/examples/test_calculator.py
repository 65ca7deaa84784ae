"""The calculator example: its rows, its tokens, its demonstrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.chat import ChatArgs, Renderer
from tailrace.data import DatasetEntry, load_dataset
from tailrace_cli.commands.baselines import measure_baselines
from tailrace_cli.experiment import load
from tailrace_envs.baselines import success_on_rows
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.weights import ModelCard

ROOT = Path(__file__).parents[3]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples" / "calculator")
    import sums_model

    return sums_model


@pytest.fixture
def renderer(example: Any, tmp_path: Path) -> Renderer:
    folder = example.build_tokenizer(tmp_path)
    card = ModelCard(b"{}", {path.name: path.read_bytes() for path in folder.iterdir()})
    return Renderer.from_model_card(card, ChatArgs(tool_parser="hermes"))


def test_training_and_evaluation_ask_different_questions(example: Any) -> None:
    asked = []
    for split in ("train", "held_out"):
        entry = DatasetEntry(path="sums:rows", split=split, options={"num_rows": 300})
        dataset = load_dataset(entry, 1, "agents.datasets.sums")
        asked.append({row.data["prompt"] for row in dataset.rows})
    assert [len(questions) for questions in asked] == [300, 300]
    assert not asked[0] & asked[1]


def test_only_the_answer_itself_is_correct(example: Any) -> None:
    import sums

    task = EnvTask("sums", 0, 0, {"answer": "1702"})
    for said, expected in (("1702", 1.0), (" 1702\n", 1.0), ("1703", 0.0), ("17021702", 0.0)):
        assert sums.correct(task, [ChatMessage("assistant", said)], {}) == expected


def test_a_demonstrated_tool_call_is_read_as_one(example: Any, renderer: Renderer) -> None:
    rows = example.demonstrations(renderer, seed=1, num_episodes=20, calls=1.0)
    for token_ids, loss_mask in rows:
        ids, mask = np.array(token_ids, np.int32), np.array(loss_mask)
        assert len(ids) == len(mask)
        end = int(np.flatnonzero(ids == renderer.end_of_turn_id)[0]) + 1
        sampled = ids[:end][mask[:end] > 0]
        parsed = renderer.parse_reply(sampled)
        assert [call.name for call in parsed.message.tool_calls] == ["calculator"]
        assert parsed.malformed == ""
        unknown = renderer.encode("<|unk|>")[0]
        assert unknown not in ids


def test_a_demonstration_has_the_tokens_that_an_episode_has(example: Any, renderer: Renderer) -> None:
    ((token_ids, _),) = example.demonstrations(renderer, seed=3, num_episodes=1, calls=0.0)
    opening = renderer.opening_ids([ChatMessage("user", _question(renderer, token_ids))])
    assert token_ids[: len(opening)] == opening.tolist()


def test_demonstrations_teach_the_format_alone_and_simple_players_rarely_win(example: Any) -> None:
    import sums

    rows = list(sums.rows("held_out", 400))
    random = np.random.default_rng(1)
    for row in rows:
        *calls, answer = sums.random_replies(random, row["prompt"], calls=0.7)
        numbers = sums.numbers_of(row["prompt"])
        assert all(set(re.split(r"[-+*]", call)) <= set(numbers) for call in calls)
        assert answer in {*numbers, *map(sums.calculate, calls)}
    found = success_on_rows(sums.rows.baselines, rows)
    assert found["random"] < 0.1
    assert found["result of any call"] < 0.25 < found["result with any sign"] < 0.42


def test_the_players_of_a_data_set_stand_in_the_report() -> None:
    experiment = load(ROOT / "examples" / "calculator" / "experiment.yaml", ["scheduler.eval_groups=8"])
    (players,) = measure_baselines(experiment).values()
    assert set(players) == {"random", "result of any call", "result with any sign"}


def _question(renderer: Renderer, token_ids: list[int]) -> str:
    text = renderer.decode(np.array(token_ids, np.int32))
    return text[: text.index("?") + 1]


def test_more_rows_than_there_are_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "calculator")
    import sums

    monkeypatch.setattr(sums, "LARGEST", 9)  # 300 questions: the last of many are drawn rarely
    most = sums.num_questions("held_out")
    assert most > 10
    assert len(list(sums.rows("held_out", most))) == most
    with pytest.raises(ValueError, match=f"num_rows is {most + 1}, and held_out has {most}"):
        next(sums.rows("held_out", most + 1))
