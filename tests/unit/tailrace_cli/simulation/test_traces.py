"""Files of `tailrace simulate`: every form is read, and what is no number of a run is refused."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace_cli.__main__ import app
from tailrace_cli.simulation.calibration import read_costs
from tailrace_cli.simulation.rounds import COLUMNS
from tailrace_cli.simulation.traces import load_trace
from tailrace_cli.simulation.workload import EpisodePlan, TurnPlan

SHORT = ("--workload", "logn", "--servers", "1", "--episodes", "16", "--steps", "1")


def csv_of(*rows: str) -> str:
    return "\n".join((",".join(COLUMNS), *rows)) + "\n"


def logged(index: int, context: int, output: int, *waits_ms: float | None) -> str:
    """A line of TraceLab's logs, with some of the keys that are not read."""
    tools = [
        {"tool_name": "Bash", "tool_wall_latency_ms": wait, "is_error": False} for wait in waits_ms
    ]
    tokens = {"input_tokens_total": context, "prefix_tokens": 1, "output_tokens": output}
    return json.dumps({"session_id": "claude:a", "round_index": index} | tokens | {"tools": tools})


def plan_of(path: Path) -> EpisodePlan:
    (plan,) = load_trace(path).draw(np.random.default_rng(1), 1)
    return plan


def test_rounds_of_a_log_are_the_turns_of_their_session(tmp_path: Path) -> None:
    """New is what the context has beyond the call before; the slowest tool is waited for."""
    path = tmp_path / "rounds.jsonl"
    lines = [logged(1, 180, 30), logged(0, 100, 50, 860, 2000, None), logged(2, 150, 7, 90)]
    path.write_text("\n".join(lines) + "\n")
    assert plan_of(path) == (TurnPlan(100, 50, 2.0), TurnPlan(30, 30, 0.0), TurnPlan(1, 7, 0.0))


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.gz"])
def test_requests_without_sessions_are_episodes_of_one_turn(name: str, tmp_path: Path) -> None:
    line = '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(line.encode()) if name.endswith(".gz") else line.encode())
    assert plan_of(path) == (TurnPlan(6758, 500, 0.0),)
    assert load_trace(path).name == "requests"
    words = ["simulate", *SHORT, "--trace", str(path), "--warmup-steps", "0"]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_a_replay_with_a_byte_order_mark_is_read_and_a_wait_of_a_second_stays(tmp_path: Path) -> None:
    path = tmp_path / "replay.csv"
    path.write_text(csv_of("s,0,0,40,5,1000", "s,1,45,10,6,7"), encoding="utf-8-sig")
    assert plan_of(path) == (TurnPlan(40, 5, 1.0), TurnPlan(10, 6, 0.0))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("s,1,0,9,9,inf", "tool_wait_after_ms: expected a number from 0 to 604,800,000, found 'inf'"),
        ("s,1,0,9,9,nan", "column tool_wait_after_ms: .* found 'nan'"),
        ("s,1,0,9,9,-5", "column tool_wait_after_ms: .* found '-5'"),
        ("s,1,0,9,-9,5", "column output_len: expected a whole number from 0 to .* found '-9'"),
        ("s,1,0,9.5,9,5", "column input_len: expected a whole number .* found '9.5'"),
        (f"s,1,{10**30},9,9,5", "column prefix_len: "),
        ("s,1,0,9,9", "column tool_wait_after_ms: .* found None"),
    ],
)
def test_a_number_that_no_round_has_is_refused_with_its_place(
    row: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "replay.csv"
    path.write_text(csv_of("s,0,0,40,5,1", row))
    with pytest.raises(ConfigError, match=f"{path}, line 3: .*{told}"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("replay.csv", b"\xff", r"is no text in UTF-8 \(byte 0\); save it as UTF-8"),
        ("trace.json", b'{"episodes": "\xff"}', r"is no text in UTF-8 \(byte 14\)"),
        ("replay.csv", csv_of().encode(), "holds no round"),
        ("replay.csv", b"", "lacks the columns session_id"),
        ("replay.csv.gz", b"no archive", "Not a gzipped file"),
        ("lines.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0), "is no trace; give a .csv"),
        ("trace.json", b'{"episodes": [{"task": 0, "turns": [[9, Infinity, 0]]}]}', "malformed"),
        ("trace.json", b'{"episodes": [{"task": 0, "turns": [[9, 9, 1e999]]}]}', "out of range"),
        ("trace.json", b'{"episodes": [{"task": 0, "turns": [[9, -9, 0]]}]}', r"turns\[0\]\[1\]"),
        ("trace.json", b'{"episodes": []}', r"length >= 1 - at `\$.episodes`"),
        ("trace.json", b'{"output_tokens_quantiles": [1e999]}', "out of range"),
        ("trace.json", b'{"other": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_its_name(
    name: str, content: bytes, told: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as refused:
        load_trace(path)
    assert f"--trace {path}" in str(refused.value)


def test_a_line_that_is_no_round_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(logged(0, 9, 9) + "\n\n" + logged(1, 9, -1) + "\n")
    with pytest.raises(ConfigError, match=rf"{path}, line 3: .*\$\.output_tokens"):
        load_trace(path)


@pytest.mark.parametrize(
    "content",
    [
        '{"max_running": 0}', '{"kv_tokens": -1}', '{"a_s": 0}', '{"a_s": 1e999}', '{"b_s": 1}',
        '{"host_kv_tokens": NaN}', "[]", "[" * 100_000,
    ],
)  # fmt: skip
def test_costs_that_no_engine_has_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--engine {path}: .*give a JSON object of a_s, "):
        read_costs(path)


def test_costs_that_a_file_gives_are_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"a_s": 0.5, "host_kv_tokens": 0}', encoding="utf-8-sig")
    assert read_costs(path) == {"a_s": 0.5, "host_kv_tokens": 0}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *product(["--rho", "--slow", "--trace-scale", "--learner-tokens-per-s"], ["inf", "nan", "-1"]),
        ("--learner-tokens-per-s", "0.5"),
    ],
)
def test_a_number_without_an_end_is_refused_at_once(option: str, value: str) -> None:
    refused = CliRunner().invoke(app, ["simulate", *SHORT, f"{option}={value}"])
    assert refused.exit_code == 2
    assert option in refused.output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--servers", "²"), ("--servers", "8,"), ("--servers", "0")],
)
def test_numbers_that_make_no_cluster_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} {value}: "):
        CliRunner().invoke(app, ["simulate", *SHORT, option, value], catch_exceptions=False)
