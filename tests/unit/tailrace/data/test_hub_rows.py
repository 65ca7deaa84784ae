"""Columns, instructions and data sources: rows of published data sets as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.data import Dataset, DatasetEntry, load_dataset, prompt_messages

RAW = [
    {"question": f"{index}+1?", "answer": f"so\n#### {index + 1}", "id": index} for index in range(5)
]


def folder_of(base: Path, names: tuple[str, ...]) -> Path:
    for part, name in enumerate(names):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        rows = RAW[part :: len(names)]
        (base / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def load(path: object, **options: Any) -> Dataset:
    return load_dataset(DatasetEntry(path=str(path), **options), 1, "agents.datasets.sums")


def test_columns_get_the_names_that_rows_need(tmp_path: Path) -> None:
    path = folder_of(tmp_path, ("train.jsonl",))
    dataset = load(path, columns={"prompt": "question", "ground_truth": "answer"}, data_source="gsm8k")
    row = dataset.rows[1].data
    assert (row["prompt"], row["ground_truth"], row["id"]) == ("1+1?", "so\n#### 2", 1)
    assert row["data_source"] == "gsm8k"
    assert not {"question", "answer"} & set(row)


def test_dots_lead_into_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"q": "?", "info": {"truth": 3}, "a.b": 4}]))
    row = load(path, columns={"prompt": "q", "answer": "info.truth", "c": "a.b"}).rows[0].data
    assert (row["answer"], row["c"], row["info"]) == (3, 4, {"truth": 3})


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    path = folder_of(tmp_path, ("train.jsonl",))
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: there is no column 'quest': .*question"):
        load(path, columns={"prompt": "quest"})


def test_an_instruction_stands_below_the_question(tmp_path: Path) -> None:
    columns = {"prompt": "question"}
    path = folder_of(tmp_path, ("train.jsonl",))
    told = {"columns": columns, "instruction": "Box it.", "system_prompt": "Calculate."}
    assert load(path, columns=columns, instruction="Box it.").rows[0].data["prompt"] == (
        "0+1?\n\nBox it."
    )
    assert [one.content for one in prompt_messages(load(path, **told).rows[0].data)] == [
        "Calculate.",
        "0+1?\n\nBox it.",
    ]


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"), {"name": "main"}),
        (("data/train-00000-of-00001.jsonl",), {}),
        (("train-a.jsonl", "train-b.jsonl", "test-a.jsonl"), {}),
    ],
)
def test_a_copied_data_set_is_read_in_its_parts(
    tmp_path: Path, names: tuple[str, ...], options: dict[str, str]
) -> None:
    dataset = load(folder_of(tmp_path, names), **options)
    wanted = sum(len(RAW[part :: len(names)]) for part, name in enumerate(names) if "train" in name)
    assert len(dataset) == wanted


@pytest.mark.parametrize(
    "names",
    [
        ("data/train-00000-of-00002.jsonl",),
        ("train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
    ],
)
def test_a_copy_that_lacks_a_part_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"sums\.path: .* holds \d files that are parts of .*2: copy"):
        load(folder_of(tmp_path, names))


def test_rows_of_the_hub_have_its_name_as_their_source(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    path = folder_of(tmp_path, ("train.jsonl",)) / "train.jsonl"
    options = {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}
    rows = load("json", format="hub", options=options, columns={"prompt": "question"}).rows
    assert {row.data["data_source"] for row in rows} == {"json"}


def test_a_hub_that_cannot_be_reached_is_told_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"agents\.datasets\.sums: loading 'nobody/none' .*HF_HOME"):
        load("nobody/none")
