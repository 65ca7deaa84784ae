"""Rows of every kind of source, and their order in training and evaluation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.data import Dataset, DatasetEntry, load_dataset, prompt_messages
from tailrace.data.rows import require_prompt
from tailrace_protos.chat import ChatMessage, ToolCall

KEY = "agents.datasets.sums"
ROWS = [{"prompt": f"{index}+1", "answer": index + 1} for index in range(7)]


def jsonl(folder: Path, rows: list[Any], name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: object, **options: Any) -> Dataset:
    return load_dataset(DatasetEntry(path=str(path), **options), 1, KEY)


def rows_for_test(split: str, num: int = 2) -> Any:
    return ({"prompt": f"{split} {index}"} for index in range(num))


def keep_even(row: dict[str, Any]) -> dict[str, Any] | None:
    return {"prompt": row["prompt"], "truth": row["answer"]} if row["answer"] % 2 == 0 else None


def prompts(dataset: Dataset) -> list[str]:
    return [row.data["prompt"] for row in dataset.rows]


def test_the_same_rows_come_from_every_kind_of_file(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    of_lines = load(jsonl(tmp_path, ROWS))
    for other in ("rows.json", "rows.parquet"):
        dataset = load(tmp_path / other)
        assert [row.data for row in dataset.rows] == [row.data for row in of_lines.rows]
        assert dataset.rows[2].origin == f"{tmp_path / other}[2]"
    assert of_lines.rows[2].origin == f"{tmp_path}/train.jsonl:3"


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    jsonl(tmp_path, ROWS[:1])
    jsonl(tmp_path, ROWS[1:3], "test.jsonl")
    assert prompts(load(tmp_path, split="test")) == ["1+1", "2+1"]
    assert prompts(load(tmp_path)) == ["0+1"]
    with pytest.raises(ConfigError, match=r"sums\.split: .* holds none of dev\.jsonl"):
        load(tmp_path, split="dev")


def test_a_python_function_makes_rows_of_a_split() -> None:
    dataset = load(f"{__name__}:rows_for_test", split="dev", options={"num": 3})
    assert prompts(dataset) == ["dev 0", "dev 1", "dev 2"]


def test_a_hub_data_set_is_loaded_by_its_own_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = jsonl(tmp_path, ROWS)
    options = {"data_files": {"held_out": str(path)}, "cache_dir": str(tmp_path / "cache")}
    dataset = load("json", format="hub", split="held_out", options=options)
    assert prompts(dataset) == [row["prompt"] for row in ROWS]


def test_a_converter_makes_rows_and_leaves_some_out(tmp_path: Path) -> None:
    dataset = load(jsonl(tmp_path, ROWS), converter=f"{__name__}:keep_even", limit=2)
    assert [row.data["truth"] for row in dataset.rows] == [2, 4]
    assert "answer" not in dataset.rows[0].data


def test_what_a_row_does_not_say_comes_from_the_entry(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2*3"},
        {"prompt": [{"role": "user", "content": "2*4"}], "agent_name": "mine", "tools": []},
        {"prompt": "2*5", "tools_kwargs": {"search": {"top": 1}, "calculator": None}},
    ]
    given = {"calculator": {"digits": 2}}
    dataset = load(
        jsonl(tmp_path, rows),
        agent_name="tool_agent",
        tools=("calculator",),
        tools_kwargs=given,
        system_prompt="Calculate.",
    )
    first, second, third = (row.data for row in dataset.rows)
    assert (first["agent_name"], first["tools"]) == ("tool_agent", ["calculator"])
    assert (second["agent_name"], second["tools"]) == ("mine", [])
    assert third["tools_kwargs"] == {**given, "search": {"top": 1}}
    for row, text in ((first, "2*3"), (second, "2*4")):
        assert [(one.role, one.content) for one in prompt_messages(row)] == [
            ("system", "Calculate."),
            ("user", text),
        ]


def test_a_row_without_an_agents_name_is_played_by_the_single_turn_agent(tmp_path: Path) -> None:
    assert load(jsonl(tmp_path, ROWS)).rows[0].data["agent_name"] == "single_turn_agent"


BAD_ROWS: list[tuple[Any, str]] = [
    ([1, 2], "a row must be an object"),
    ({"prompt": ""}, "key 'prompt': is empty"),
    ({"prompt": 3}, "key 'prompt': must be text or a list of messages, found int"),
    ({"prompt": [{"role": "robot", "content": "x"}]}, "key 'prompt': message 0: role must be one of"),
    ({"prompt": [{"role": "user"}]}, "key 'prompt': message 0: content must be text, found nothing"),
    ({"prompt": [{"role": "assistant", "content": None}]}, "message 0: content must be text"),
    ({"prompt": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "message 0: tool_calls must"),
    ({"prompt": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "message 0: tool_call_id must"),
    ({"prompt": "x", "agent_name": 3}, "key 'agent_name': must be text"),
    ({"prompt": "x", "tools": "calculator"}, "key 'tools': must be a list"),
    ({"prompt": "x", "tools_kwargs": []}, "key 'tools_kwargs': must be an object"),
    ({"prompt": "x", "tools_kwargs": {"a": 1}}, "key 'tools_kwargs': .* for 'a'"),
]


def test_tool_calls_of_a_prompt_reach_the_model(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [
        {"role": "user", "content": "1+1?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    asked, called, answered = prompt_messages(load(jsonl(tmp_path, [{"prompt": prompt}])).rows[0].data)
    assert asked == ChatMessage("user", "1+1?")
    assert called == ChatMessage("assistant", "", (ToolCall("c1", "add", '{"a":1}'),))
    assert answered == ChatMessage("tool", "2", tool_call_id="c1", name="add")


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS)
def test_a_bad_row_is_named_with_file_line_and_key(tmp_path: Path, row: Any, problem: str) -> None:
    path = jsonl(tmp_path, [ROWS[0], row])
    with pytest.raises(ConfigError, match=problem) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_row_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rows_of_sets\[0\]: key 'place'"):
        load(f"{__name__}:rows_of_sets")


def rows_of_sets(split: str) -> Any:
    return [{"prompt": split, "place": object()}]


def test_a_missing_prompt_is_told_to_who_needs_one(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "?"}])
    with pytest.raises(ConfigError, match=r":1: key 'prompt' is missing \(found .*question"):
        require_prompt(load(path).rows[0])


def test_bad_sources_are_named_with_their_key(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "x"}\n\n{"prompt": \n')
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    empty = jsonl(tmp_path, [])
    cases = [
        (broken, rf"{broken}:3: is not valid JSON"),
        (tmp_path / "none.jsonl", r"sums\.path: cannot read .*none\.jsonl: No such file"),
        ("none.jsonl", r"none\.jsonl: No such file or directory; paths are relative to .* started, /"),
        ("none.parquet", r"none\.parquet: No such file or directory; paths are relative to"),
        (tmp_path / "object.json", "must hold a list of rows, found dict"),
        (tmp_path / "no.parquet", r"sums\.path: cannot read .*no\.parquet"),
        (empty, "agents.datasets.sums: .* gives no rows"),
        ("./sums", r"sums\.path: './sums' is neither a file"),
        ("no_module_here:rows", r"sums\.path: cannot import 'no_module_here'"),
        (f"{__name__}:raising", "data_sets_raise|raising raised KeyError"),
        (f"{__name__}:rows_until_exit", r"rows_until_exit raised ExitError: it ended its process"),
        (f"{__name__}:rows_of_holes", r"rows_of_holes\[0\]: key 'board': .*: use numbers"),
    ]
    for path, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            load(path)


def raising(split: str) -> Any:
    raise KeyError(split)


def rows_until_exit(split: str) -> Any:
    yield {"prompt": split}
    raise SystemExit(0)


def rows_of_holes(split: str) -> Any:
    board: list[Any] = []
    for _ in range(100_000):
        board = [board]
    yield {"prompt": split, "board": board}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "x", "answer": NaN}', r":1: is not valid JSON: it has NaN, Infinity or half"),
        (r'{"prompt": "x \ud83d"}', r":1: is not valid JSON: it has NaN, Infinity or half"),
        (f'{{"prompt": "x", "board": {"[" * 5000}{"]" * 5000}}}', r":1: is not valid JSON: .*depth"),
        ('\ufeff{"prompt": "x"}', r":1: is not valid JSON: .*without a byte order mark"),
    ],
)
def test_what_other_writers_take_for_json_is_told(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        load(path)


def test_a_damaged_part_of_a_parquet_file_is_told(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the package pyarrow is not installed")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["x" * 1000] * 1000}), path)
    content = bytearray(path.read_bytes())
    content[50:100] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"sums\.path: cannot read .*rows\.parquet: .*download it"):
        load(path)


def test_an_iterator_of_the_hub_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

    def broken(*_args: Any, **_options: Any) -> Any:
        yield ROWS[0]
        raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(ConfigError, match=r"loading 'owner/sums' .*ConnectionError: reset.*HF_HOME"):
        load("owner/sums", options={"streaming": True})


def dataset_of(num: int, seed: int = 1) -> Dataset:
    return load_dataset(DatasetEntry(path=f"{__name__}:rows_for_test", options={"num": num}), seed, KEY)


def test_every_epoch_visits_each_row_once_in_another_order() -> None:
    dataset = dataset_of(50)
    order = [dataset.train_row(ordinal).data["prompt"] for ordinal in range(150)]
    epochs = [tuple(order[start : start + 50]) for start in (0, 50, 100)]
    assert all(set(Counter(epoch).values()) == {1} for epoch in epochs)
    assert len(set(epochs)) == 3


def test_the_order_of_training_follows_from_the_runs_seed_alone() -> None:
    again = dataset_of(50)
    order = [again.train_row(ordinal).data["prompt"] for ordinal in range(3)]
    assert order == ["train 45", "train 26", "train 21"]  # as every release must give it
    other = dataset_of(50, seed=2)
    assert [other.train_row(ordinal).data["prompt"] for ordinal in range(3)] != order


def test_an_evaluation_goes_through_the_rows_as_they_lie() -> None:
    dataset = dataset_of(3)
    asked = [dataset.eval_row(ordinal).data["prompt"] for ordinal in range(4)]
    assert asked == ["train 0", "train 1", "train 2", "train 0"]
