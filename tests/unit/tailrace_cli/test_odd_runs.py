"""Folders of runs that were damaged, moved, cut or named oddly, as commands meet them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tailrace.config import ConfigError
from tailrace_cli.__main__ import main
from tailrace_cli.cluster.local import LocalCluster, clear_run_dir, take_lock
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.commands.sweep import sweep_runs
from tailrace_cli.console import plain_console
from tailrace_cli.experiment import load
from tailrace_cli.launch import read_launches, record_launch
from tailrace_cli.live_view import ProgressView
from tailrace_cli.reporting.curves import PANELS, curves
from tailrace_cli.reporting.pages import RunReport
from tailrace_cli.run_folders import RunFolder, lines_from_end
from tailrace_cli.summary import Row, summary_table
from tailrace_protos.chat import ChatMessage, ToolCall
from tests.unit.tailrace_cli.test_failures_shown import status
from tests.unit.tailrace_cli.test_report import kept
from tests.unit.tailrace_cli.test_report import make_run as report_run
from tests.unit.tailrace_cli.test_runs import FINISHED, STARTED, held, line, make_run, run

LAUNCH: dict[str, Any] = {
    "unix_s": 1.0,
    "command": "",
    "folder": "",
    "commit": "",
    "machine": "",
    "versions": {},
}
ODD: dict[str, tuple[Any, ...]] = {
    "launch.json": (None, 7, [{}], [{**LAUNCH, "unix_s": "now"}], [{**LAUNCH, "unix_s": 1e300}]),
    "baselines.json": (None, [], {"lake": 1}, {"lake": {"random": None}}),
    "metrics.jsonl": ({"step": "three"}, {"step": None}),
}
SETTINGS = (
    {1: 2},
    {"logging_dir": 5},
    {"render_save_dir": [1]},
    {"evaluations": ["held_out"]},
    {"evaluations": {"held_out": 3}},
    {"evaluations": {"held_out": {"temperature": "warm"}}},
    {"agents": 5},
    {"agents": {"eval_generating_args": [1]}},
)


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, each in ODD.items() for content in each]
)
def test_a_file_with_other_values_than_a_run_writes_is_named(
    tmp_path: Path, name: str, content: object
) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(ConfigError, match=f"{folder / name} is damaged"):
        run("report", str(folder))


@pytest.mark.parametrize("content", SETTINGS)
def test_settings_that_no_run_has_are_told_by_their_file(tmp_path: Path, content: object) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        run("report", str(folder))


def test_settings_nested_without_end_are_told_by_their_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "config.yaml").write_text("[" * 3000)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        run("status", str(folder))


def test_a_damaged_record_of_starts_keeps_no_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text("")
    record_launch(tmp_path, tmp_path)
    assert len(read_launches(tmp_path)) == 1
    assert (tmp_path / "launch.json.damaged").exists()


def test_a_folder_whose_name_is_no_text_is_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED, name=os.fsdecode(b"caf\xe9"))
    monkeypatch.chdir(folder)
    record_launch(folder, folder)
    assert read_launches(folder)[0].folder.endswith("caf\ufffd")
    assert "caf?" in RunReport(RunFolder(folder)).write().read_text()


def test_stop_signals_no_process_that_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared disk shows the lock of a run of another machine, whose process ids mean others here."""
    folder = make_run(tmp_path, STARTED)
    with held(folder) as process:
        monkeypatch.setattr(RunFolder, "holder", os.getpid())
        with pytest.raises(ConfigError, match="another machine or container"):
            run("stop", str(folder))
        assert RunFolder(folder).is_driven_by(process.pid)
        assert process.poll() is None


def test_following_shows_a_log_that_was_emptied_from_its_new_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED)
    log, old = folder / "logs" / "agents.log", folder / "logs" / "old.log"
    log.write_text(line(1, "first") * 9)
    old.write_text(line(1, "of another run"))
    lock = take_lock(folder / "state")

    def rotate() -> None:
        log.write_text(line(2, "second"))
        old.unlink()

    events = iter((rotate, lock.close))
    monkeypatch.setattr("tailrace_cli.commands.runs.time.sleep", lambda _: next(events)())
    assert run("logs", str(folder), "agents", "-f").splitlines()[9:] == ["00:00:02 agents       second"]


@pytest.mark.parametrize("name", ["/etc/passwd", "**", "[", "*"])
def test_the_name_of_a_process_is_no_pattern(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "logs" / "agents.log").write_text(line(1, "first"))
    with pytest.raises(ConfigError, match=r"no log of .*there: agents"):
        run("logs", str(folder), name)


def test_a_run_that_cannot_be_read_hides_no_other_one(tmp_path: Path) -> None:
    events = make_run(tmp_path, name="a") / "events.jsonl"
    events.unlink()
    events.mkdir()
    make_run(tmp_path, STARTED, FINISHED, name="b")
    _, first, second = run("runs", "--output-dir", str(tmp_path)).splitlines()
    assert first.split() == ["a", "unreadable:", "Is", "a", "directory"]
    assert "finished" in second


def test_names_of_runs_and_places_in_a_summary_are_whole(tmp_path: Path) -> None:
    name = "lake_learning_rate3e-4_temperature0-7_group_size16_seed"
    for seed in (1, 2):
        make_run(tmp_path, STARTED, FINISHED, name=f"{name}{seed}")
    listed = run("runs", "--output-dir", str(tmp_path)).splitlines()
    assert [each.split()[:2] for each in listed[1:]] == [[f"{name}{n}", "finished"] for n in (1, 2)]
    output = StringIO()
    place = "/home/user/" + "folder/" * 9 + "weights"
    plain_console(file=output, width=40).print(summary_table("run", [("hint", place)]))
    shown = "".join(row.split("│")[2].strip() for row in output.getvalue().splitlines() if "│" in row)
    assert shown == place


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"torn", []),
        (b"one\n", [b"one\n"]),
        (b"one\n\ntwo words\ntorn", [b"two words\n", b"\n", b"one\n"]),
        (b"\n\n", [b"\n", b"\n"]),
    ],
)
def test_lines_are_read_from_the_end(
    tmp_path: Path,
    content: bytes,
    lines: list[bytes],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace_cli.run_folders._BLOCK_BYTES", block_bytes)
    (tmp_path / "file").write_bytes(content)
    assert list(lines_from_end(tmp_path / "file")) == lines


def test_a_report_is_written_into_a_folder_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, there = make_run(tmp_path, STARTED), tmp_path / "pages"
    there.mkdir()
    monkeypatch.chdir(there)
    run("report", str(folder), "-o", ".")
    run("report", str(folder), str(folder), "-o", str(there))
    assert sorted(file.name for file in there.iterdir()) == ["comparison.html", "report.html"]


def test_a_page_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        RunReport(RunFolder(folder)).write(tmp_path / "taken")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lake", "taken"]


def test_curves_of_a_long_run_are_thinned_to_what_a_picture_shows() -> None:
    rows: list[Row] = [
        {"step": step, "time_s": 2.0 * step, "loss": 1.0 + step % 7, "eval/success_rate": None}
        for step in range(50_000)
    ]
    rows[31_234]["loss"] = 99.0
    rows[31_235]["loss"] = -99.0
    for step in range(0, 50_000, 1000):
        rows[step]["eval/success_rate"] = step / 50_000
    success, loss = curves({"long": rows}, PANELS)
    (few,), (many,) = success["tables"], loss["tables"]
    assert few["axes"][0] == list(range(0, 50_000, 1000))
    assert 1000 < len(many["axes"][0]) <= 2002
    assert {99.0, -99.0} <= {*many["values"][0]}
    assert (many["axes"][0][0], many["axes"][0][-1]) == (0, 49_999)
    assert many["axes"][1] == [2.0 * step for step in many["axes"][0]]


def test_a_name_that_no_file_can_have_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrace", "status", "a" * 300])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "File name too long: correct the path" in capsys.readouterr().err


def test_a_run_behind_a_link_is_overwritten_where_it_is(tmp_path: Path) -> None:
    there, elsewhere = make_run(tmp_path / "scratch", STARTED), tmp_path / "weights"
    elsewhere.mkdir()
    (there / "checkpoints").symlink_to(elsewhere)
    link = tmp_path / "lake"
    link.symlink_to(there)
    clear_run_dir(link)
    assert link.is_symlink()
    assert elsewhere.is_dir()
    assert not any(there.iterdir())


def test_a_run_that_was_deleted_in_part_can_be_overwritten_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED)
    delete = shutil.rmtree

    def interrupted(path: Path) -> None:
        delete(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    while any(path.is_dir() for path in folder.iterdir()):
        with pytest.raises(KeyboardInterrupt):
            clear_run_dir(folder)
        assert (folder / "config.yaml").exists()
    clear_run_dir(folder)
    assert not any(folder.iterdir())


def test_a_folder_of_no_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no run directory: delete it by hand"):
        clear_run_dir(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


async def test_a_folder_for_logs_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["exp_name=lake", f"output_dir={tmp_path}", f"logging_dir={tmp_path / 'file'}"]
    experiment = load(examples_folder() / "own_algorithm" / "experiment.yaml", words)
    with pytest.raises(ConfigError, match="choose another logging_dir"):
        async with LocalCluster(experiment):
            pass


@pytest.mark.parametrize("url", ["", "nats://", "nats://here:port"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--nats '{url}' is no URL"):
        run("tools", "ls", "--nats", url)


def test_a_terminal_that_cannot_move_its_cursor_sees_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    output = StringIO()
    with ProgressView(plain_console(file=output, force_terminal=True, width=80), "lake") as view:
        view.update(status(step=1))
        assert "training  step 1/9" in output.getvalue()


def test_a_name_that_the_terminal_cannot_show_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path, STARTED, name=os.fsdecode(b"caf\xe9"))
    command = [sys.executable, "-m", "tailrace", "runs", "--output-dir", str(tmp_path)]
    given = {"PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **given}
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert r"caf\udce9" in listed.stdout


def test_a_swept_key_is_given_once() -> None:
    with pytest.raises(ConfigError, match="seed is swept and given twice"):
        sweep_runs(["seed=1,2", "max_steps=3", "++seed=5"])


@pytest.mark.parametrize("values", ["glob(*)", "interval(0,1)"])
def test_a_sweep_needs_values(values: str) -> None:
    with pytest.raises(ConfigError, match="names no values to sweep"):
        sweep_runs([f"seed={values}"])


def test_an_endless_episode_is_shown_by_its_ends(tmp_path: Path) -> None:
    folder = report_run(tmp_path)
    calls = tuple(ToolCall(str(n), f"tool{n}", "{}" * 9000) for n in range(50))
    said = tuple(ChatMessage("assistant", f"turn {n}." + "x" * 9000, calls) for n in range(400))
    episode = kept("e2-v3", 0, 1.0, *said)
    (folder / "episodes" / "agents.jsonl").write_bytes(msgspec.json.encode(episode) + b"\n")
    page = RunReport(RunFolder(folder)).write()
    text = page.read_text()
    assert "turn 0." in text
    assert "turn 399." in text
    assert "[300 more messages]" in text
    assert "[42 more calls]" in text
    assert "tool49" not in text
