"""Sweeps: several values of a key are several runs, which are compared; real child processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import lacks_checkpoint
from tailrace_cli.commands.sweep import _Children, commands_of, slots_of, sweep, sweep_runs
from tailrace_cli.console import plain_console
from tailrace_cli.experiment import load
from tailrace_cli.run_folders import RunFolder
from tests.unit.tailrace_cli.test_runs import FINISHED, STARTED, held, line, make_run

ROOT = Path(__file__).parents[3]


def test_every_combination_of_values_is_a_run_with_a_name() -> None:
    runs = sweep_runs(["seed=1,2", "learner.loss=dapo,gspo", "max_steps=3", "scheduler.tags=[a,b]"])
    assert [run.suffix for run in runs] == [
        "_seed1_lossdapo", "_seed1_lossgspo", "_seed2_lossdapo", "_seed2_lossgspo",
    ]  # fmt: skip
    fixed = ("max_steps=3", "scheduler.tags=[a,b]")
    assert runs[1].overrides == ("seed=1", "learner.loss=gspo", *fixed)
    assert len(sweep_runs(["seed=range(1,4)"])) == 3


@pytest.mark.parametrize(
    "words",
    [
        ["seed=range(1,99999999999)"],
        ["seed=shuffle(range(99999999999,1,step=-1))"],
        ["seed=range(0,40)", "learner.pg_clip=range(0,40)"],
    ],
)
def test_a_sweep_of_too_many_runs_is_refused_at_once(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="a sweep has at most 1000 runs"):
        sweep_runs(words)


def test_each_run_of_a_sweep_is_checked_with_its_name() -> None:
    path = ROOT / "examples" / "own_algorithm" / "experiment.yaml"
    runs = commands_of(path, sweep_runs(["learner.pg_clip=0.1,1e-2"]), ["--overwrite"])
    names = ["own_algorithm_pg_clip0-1", "own_algorithm_pg_clip0-01"]
    assert [folder.path.name for folder, _ in runs] == names
    assert runs[0][1][2:] == ["learner.pg_clip=0.1", f"exp_name={names[0]}", "--overwrite"]
    with pytest.raises(ConfigError, match="group_size"):
        commands_of(path, sweep_runs(["group_size=8,0"]), [])


def test_a_sweep_that_continues_leaves_out_runs_that_are_done_and_begins_those_that_never_began(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / "own_algorithm" / "experiment.yaml"
    for seed, step in ((1, 5), (2, 3)):
        run_dir = tmp_path / f"own_algorithm_seed{seed}"
        checkpoint = run_dir / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "run_state.json").write_text(f'{{"step": {step}}}')
        (run_dir / "events.jsonl").touch()
    words = ["seed=1,2,3", f"output_dir={tmp_path}", "resume_from_checkpoint=true"]
    done, begun, new = commands_of(path, sweep_runs(words), [])
    assert done[1] == []
    assert begun[1][-1] == "exp_name=own_algorithm_seed2"
    assert new[1][-1] == "resume_from_checkpoint=false"
    assert sweep([done], [{}], tmp_path) == 0
    assert "own_algorithm_seed1 has done all its steps" in capfd.readouterr().err


def test_a_sweep_that_would_meet_an_earlier_run_begins_none(tmp_path: Path) -> None:
    path = ROOT / "examples" / "own_algorithm" / "experiment.yaml"
    earlier = tmp_path / "own_algorithm_seed2"
    earlier.mkdir()
    (earlier / "events.jsonl").touch()
    runs = sweep_runs(["seed=1,2", f"output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=f"{earlier} holds an earlier run"):
        commands_of(path, runs, [])
    assert len(commands_of(path, runs, ["--overwrite"])) == 2


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    path = ROOT / "examples" / "own_algorithm" / "experiment.yaml"
    words = [f"output_dir={tmp_path}", "resume_from_checkpoint=true", "exp_name=early"]
    with pytest.raises(ConfigError, match="holds no run"):
        lacks_checkpoint(load(path, words))
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "events.jsonl").touch()
    assert lacks_checkpoint(load(path, words))
    (tmp_path / "early" / "checkpoints" / "step_0").mkdir(parents=True)
    assert not lacks_checkpoint(load(path, words))


def test_single_values_and_lists_are_no_sweep() -> None:
    assert sweep_runs(["seed=1", "scheduler.tags=[a,b]", "note='a,b'"]) == []


def test_names_of_runs_must_differ() -> None:
    with pytest.raises(ConfigError, match="one name"):
        sweep_runs(["a.x=1,2", "pretrain='a/b','a b'"])
    with pytest.raises(ConfigError, match="sweep another key"):
        sweep_runs(["exp_name=a,b"])


def test_runs_are_compared_and_a_failed_one_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, absent = make_run(tmp_path, STARTED, FINISHED, name="good"), tmp_path / "absent"
    runs = [(RunFolder(good), ["--version"]), (RunFolder(absent), ["status", str(absent)])]
    code = sweep(runs, [{}, {}], tmp_path)
    assert code == 2
    compared, told = capfd.readouterr()
    assert f"error: run absent ended with exit code 2: no run '{absent}' in runs" in told
    assert "0.750" in compared
    assert "no run" in (tmp_path / "absent.log").read_text()
    assert "good" in (tmp_path / "comparison.html").read_text()


def test_a_run_that_a_signal_killed_is_a_failure_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one for which there was no memory; the others succeed."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\n[ "$3" = --version ] || kill -KILL $$\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    runs = [(RunFolder(tmp_path / word), [word]) for word in ("--version", "init")]
    assert sweep(runs, [{}], tmp_path) == 128 + signal.SIGKILL


def test_each_of_the_runs_at_once_has_the_environment_of_its_place(tmp_path: Path) -> None:
    runs = [(RunFolder(tmp_path / name), ["init"]) for name in ("right", "wrong")]
    assert sweep(runs, [{"TAILRACE_LOG": "json"}, {"TAILRACE_LOG": "xml"}], tmp_path) == 2
    assert "frozen_lake" in (tmp_path / "right.log").read_text()
    assert "TAILRACE_LOG='xml'" in (tmp_path / "wrong.log").read_text()
    assert all(log.stat().st_mode & 0o077 == 0 for log in tmp_path.glob("*.log"))


def test_as_many_runs_at_once_as_fit_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    made = load(ROOT / "examples" / "own_algorithm" / "experiment.yaml")
    slots = slots_of(made, 0)
    assert f"runs at once: {len(slots)}; more would lack" in capfd.readouterr().err
    many = len(slots) + 1
    assert len(slots_of(made, many)) == many
    assert f"--jobs {many}: {len(slots)} would fit this machine" in capfd.readouterr().err
    assert slots_of(made, 1) == [{}]


SWEEP = """
import sys
from pathlib import Path
from tailrace_cli.commands.sweep import sweep
from tailrace_cli.run_folders import RunFolder
folder = Path(sys.argv[1])
words = ["logs", str(folder), "-f", "-n", "1"]
runs = [(RunFolder(folder), words), (RunFolder(folder.parent / "next"), ["--version"])]
sys.exit(sweep(runs, [{}], folder.parent))
"""


def test_ctrl_c_ends_the_run_and_starts_no_other(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STARTED)
    (folder / "logs" / "agents.log").write_text(line(1, "it goes on"))
    command = [sys.executable, "-c", SWEEP, str(folder)]
    with (
        held(folder),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        while "it goes on" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    assert "interrupted" in told
    assert "tailrace 0" not in told


DRAINS = """#!{python}
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("it drains at a signal", flush=True)
signal.sigwait([signal.SIGTERM])
print("it drains, and ends at the next one", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
signal.pause()
"""


def test_a_second_ctrl_c_ends_a_run_that_drains(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(DRAINS.format(python=sys.executable))
    program.chmod(0o755)
    script = f"import sys\nsys.executable = {str(program)!r}\n{SWEEP}"
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for said in ("it drains at a signal", "ends at the next one"):
            while said not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
        try:
            told = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in told
    assert "it drains" not in told, "no other run begins"


async def test_a_ctrl_c_at_the_start_of_a_run_that_ends_at_once_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 2\n")
    program.chmod(0o755)
    children, start = _Children(), asyncio.create_subprocess_exec

    async def start_late(*words: str, **options: Any) -> asyncio.subprocess.Process:
        child = await start(*words, **options)
        await child.wait()
        children.interrupt()
        return child

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_late)
    assert await children.run(["init"], {}, tmp_path / "log") == 2
    assert children.is_interrupted


def test_texts_with_brackets_and_colons_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain_console().print("error: [bold]tags[/bold] [0] :smile:")
    assert capsys.readouterr().out == "error: [bold]tags[/bold] [0] :smile:\n"
