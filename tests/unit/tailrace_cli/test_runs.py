"""`tailrace runs`, `status`, `logs`, `stop` on folders of runs; a real process holds a running one."""

import errno
import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace_cli.__main__ import app, main
from tailrace_cli.cluster.local import take_lock
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.run_folders import RunFolder, find_run
from tailrace_cli.summary import read_health
from tailrace_protos.event import (
    Event,
    EventBody,
    ModelPrepared,
    RunFailed,
    RunFinished,
    RunStarted,
    WarmStartAdvanced,
)

STARTED = RunStarted("lake", "0")
FINISHED = RunFinished(3, "all steps are done")
FAILED = RunFailed("stall", 3, "no episode ended", "agents")
HOLD = """
import pathlib, signal, sys
from tailrace_cli.cluster.local import take_lock
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
lock = take_lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
signal.sigwait([signal.SIGTERM])
"""


def make_run(root: Path, *ends: EventBody, name: str = "lake") -> Path:
    """A run's folder with start and end events and one log."""
    folder = root / name
    (folder / "logs").mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "config.yaml").write_text("exp_name: lake\nlogging_dir: ''\n")
    events = (Event(f"{index}-0", 0.0, "scheduler", body) for index, body in enumerate(ends))
    (folder / "events.jsonl").write_bytes(
        b"".join(msgspec.json.encode(each) + b"\n" for each in events)
    )
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "eval/success_rate": 0.75}) + "\n")
    return folder


def test_a_run_of_another_user_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied", "/runs/theirs/state/lock")

    monkeypatch.setattr(sys, "argv", ["tailrace", "status", str(make_run(tmp_path, STARTED))])
    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "/runs/theirs/state/lock is not this user's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("has_begun", "told"),
    [(True, "continue with resume_from_checkpoint=true"), (False, "nothing had begun yet")],
)
def test_an_interrupted_run_says_whether_there_is_something_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool, told: str
) -> None:
    def begin(_experiment: object, *_others: object, **_options: object) -> None:
        folder = make_run(tmp_path, *((STARTED,) if has_begun else ()))
        if not has_begun:
            (folder / "events.jsonl").unlink()
            (folder / "metrics.jsonl").unlink()

    monkeypatch.setattr("tailrace_cli.commands.train.run_to_the_end", begin)
    example = str(examples_folder() / "own_algorithm")
    printed = run("train", example, "exp_name=lake", f"output_dir={tmp_path}", exit_code=130)
    assert printed.splitlines()[-1] == f"interrupted: {told}"


def test_a_file_that_was_damaged_meanwhile_changes_no_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(_experiment: object, *_others: object) -> str:
        (make_run(tmp_path, STARTED, FINISHED) / "metrics.jsonl").write_text("no row\n")
        return "finished"

    monkeypatch.setattr("tailrace_cli.commands.train.run_to_the_end", finish)
    words = (str(examples_folder() / "own_algorithm"), "exp_name=lake", f"output_dir={tmp_path}")
    assert "metrics.jsonl is damaged" in run("train", *words)


def test_a_run_on_a_disk_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED, FINISHED)
    (folder / "state" / "lock").write_text("1")
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *others: Any, **options: Any) -> Any:
        if mode != "r" and mode != "rb":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, mode, *others, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert "finished" in run("status", str(folder))


def test_who_looks_at_a_run_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "state" / "lock").write_text("1")
    with (folder / "state" / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as another command that looks
        assert RunFolder(folder).holder == 0


def test_the_run_in_this_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path, STARTED))
    assert find_run(".", "runs").path.name == "lake"


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run as `tailrace train` does, until SIGTERM."""
    command = [sys.executable, "-c", HOLD, str(folder / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def run(*arguments: str, exit_code: int = 0) -> str:
    """Output of a command."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ((), "not started"),
        ((STARTED,), "interrupted"),
        ((STARTED, FINISHED), "finished"),
        ((STARTED, FAILED), "failed"),
        ((STARTED, FAILED, STARTED), "interrupted"),
    ],
)
def test_a_run_without_a_process_is_told_by_its_newest_start_or_end(
    tmp_path: Path, ends: tuple[EventBody, ...], state: str
) -> None:
    assert find_run(str(make_run(tmp_path, *ends)), "runs").state()[0] == state


def test_status_tells_the_progress_of_a_warm_start_until_it_is_done(tmp_path: Path) -> None:
    advanced = WarmStartAdvanced(40, 300, 1.25)
    folder = make_run(tmp_path, STARTED, WarmStartAdvanced(20, 300, 2.5), advanced)
    (folder / "metrics.jsonl").unlink()
    under_way = CliRunner().invoke(app, ["status", str(folder)]).output
    assert "step 40/300, loss 1.250" in under_way
    done = make_run(tmp_path, STARTED, advanced, ModelPrepared(9, 300, 1.0, 1.25), name="done")
    assert "warm start" not in CliRunner().invoke(app, ["status", str(done)]).output


def test_a_torn_end_of_the_log_is_no_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED, FINISHED)
    content = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(content[:-5])
    assert find_run(str(folder), "runs").state()[0] == "interrupted"


def test_a_run_that_goes_on_is_listed_as_running_and_stop_ends_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    with held(folder) as process:
        listed = run("runs", "--output_dir", str(tmp_path))
        assert "running" in listed
        assert "0.750" in listed
        assert f"process {process.pid}" in run("status", "lake", "--output_dir", str(tmp_path))
        assert "interrupted" in run("stop", "lake", "--output_dir", str(tmp_path))
        assert process.wait(timeout=60) == 0


def test_a_run_that_does_not_end_in_time_makes_stop_fail(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    with held(folder) as process:
        process.send_signal(signal.SIGSTOP)
        told = run("stop", str(folder), "--timeout_s", "0.3", exit_code=1)
    assert "has not ended" in told


def test_stop_refuses_a_run_that_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not run: its state is finished"):
        run("stop", str(make_run(tmp_path, STARTED, FINISHED)))


def test_an_unknown_run_is_refused_with_the_names_there(tmp_path: Path) -> None:
    make_run(tmp_path, name="lake")
    with pytest.raises(ConfigError, match=r"no run 'pond'.*lake"):
        run("status", "pond", "--output_dir", str(tmp_path))


def line(second: int, event: str, **fields: object) -> str:
    """A line of a service's log."""
    timestamp = f"2026-01-01T00:00:{second:02}.0Z"
    return json.dumps({"event": event, "timestamp": timestamp, "level": "info", **fields}) + "\n"


def test_logs_of_all_processes_are_merged_by_time_and_cut_to_the_newest(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "logs" / "learner.log").write_text(line(1, "first") + line(3, "third", step=[7]))
    (folder / "logs" / "agents.log").write_text(line(2, "second", run="lake") + "plain [text]\n")
    told = [each.strip() for each in run("logs", str(folder), "-n", "3").splitlines()]
    assert told == [
        "00:00:02 agents       second",
        "agents       plain [text]",
        "00:00:03 learner      third step=[7]",
    ]
    assert "second" not in run("logs", str(folder), "learner")


def test_a_run_starts_though_its_state_is_looked_at_in_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED)
    looking = (folder / "state" / "lock").open("a+")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("tailrace_cli.cluster.local.time.sleep", lambda _: looking.close())
    with take_lock(folder / "state"), pytest.raises(ConfigError, match="going on"):
        take_lock(folder / "state")


def test_following_logs_shows_whole_lines_and_processes_that_start_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, STARTED)
    agents, learner = (folder / "logs" / f"{name}.log" for name in ("agents", "learner"))
    torn = line(2, "second")
    agents.write_text(line(1, "first") + torn[:20])
    lock = take_lock(folder / "state")

    def append(file: Path, text: str) -> None:
        with file.open("a") as output:
            output.write(text)

    events = iter(
        (
            lambda: append(agents, torn[20:30]),
            lambda: append(agents, torn[30:]),
            lambda: append(learner, line(3, "third")),
            lock.close,
        )
    )
    monkeypatch.setattr("tailrace_cli.commands.runs.time.sleep", lambda _: next(events)())
    told = run("logs", str(folder), "-f").splitlines()
    assert [each.split()[1:3] for each in told] == [
        ["agents", "first"],
        ["agents", "second"],
        ["learner", "third"],
    ]


def test_following_logs_ends_with_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "logs" / "agents.log").write_text(line(2, "only"))
    assert run("logs", str(folder), "-f").count("only") == 1


def test_a_process_without_a_log_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "logs" / "agents.log").write_text("")
    with pytest.raises(ConfigError, match=r"no log of nats.*agents"):
        run("logs", str(folder), "nats")


def test_a_report_is_written_of_a_run_as_it_stands(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    run("report", str(folder))
    assert "0.750" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "events.jsonl",
        "launch.json",
        "baselines.json",
        "metrics.jsonl",
        "episodes/agents.jsonl",
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / name).parent.mkdir(exist_ok=True)
    for content in (b'{"type":"run_started"\n', b'{"type":"run_started", "run": "\xff"}\n'):
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{folder / name} is damaged, or of another version"):
            run("report", str(folder))


def test_one_byte_that_is_no_text_is_told_by_every_command_that_reads_events(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED, FINISHED)
    events = folder / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"lake"', b'"l\xffke"').replace(b"all", b"\xff"))
    with pytest.raises(ConfigError, match=f"{events}:1 is no event"):
        run("why", str(folder))
    for command in ("status", "report"):
        with pytest.raises(ConfigError, match=f"{events} is damaged"):
            run(command, str(folder))
    with pytest.raises(DamagedRunError, match="is damaged"):
        read_health(folder)
    make_run(tmp_path, STARTED, FINISHED, name="other")
    told = run("runs", "--output-dir", str(tmp_path)).splitlines()
    assert [line.split()[1] for line in told[1:]] == ["damaged:", "finished"]


def test_a_damaged_run_hides_no_other_one_from_the_list(tmp_path: Path) -> None:
    (make_run(tmp_path, STARTED, name="a") / "events.jsonl").write_text('{"type":"run_started"}\n')
    (make_run(tmp_path, STARTED, name="b") / "metrics.jsonl").write_bytes(b"\xff\n")
    make_run(tmp_path, STARTED, FINISHED, name="c")
    told = run("runs", "--output-dir", str(tmp_path)).splitlines()
    assert told[1].split() == ["a", "damaged:", "events.jsonl"]
    assert told[2].split() == ["b", "damaged:", "metrics.jsonl"]
    assert "finished" in told[3]


def test_an_exception_in_a_log_is_shown_by_its_text_and_its_places(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    program = (
        "from tailrace import log; log.configure(service='agents', form='json')\n"
        "def play(key): raise ValueError('the lake [is] away')\n"
        "try: play('sesame')\n"
        "except ValueError as error: log.get_logger('m').error('failed', exc_info=error)\n"
    )
    with (folder / "logs" / "agents.log").open("w") as output:
        subprocess.run([sys.executable, "-c", program], stderr=output, check=True)
    assert "sesame" not in (folder / "logs" / "agents.log").read_text()
    _, *told = run("logs", str(folder)).splitlines()
    assert [each.strip() for each in told] == [
        "ValueError: the lake [is] away",
        "<string>:3 <module>",
        "<string>:2 play",
    ]


def test_the_temperature_of_evaluations_is_that_of_the_first_named_one(tmp_path: Path) -> None:
    agents = {"eval_generating_args": {"temperature": 0.7}}
    named = {"first": {"temperature": 0.0}, "second": {"temperature": 1.0}}
    plain = {"first": {"temperature": None}}
    for evaluations, expected in ((named, 0.0), (plain, 0.7), ({}, 0.7)):
        content = {"agents": agents, "evaluations": evaluations}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        assert RunFolder(tmp_path).eval_temperature == expected
