"""Hosts unlike ours: commands work there, or say in one line what is wrong and what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tailrace.config import ConfigError
from tailrace.processes import ProcessStartError
from tailrace_cli import __main__ as command
from tailrace_cli.cluster import servers
from tailrace_cli.cluster.local import LocalCluster, RunGoesOnError, take_lock
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.experiment import load
from tailrace_cli.loading.machine import num_usable_cores, usable_memory_bytes
from tailrace_cli.run_folders import RunFolder

LAKE = examples_folder() / "frozen_lake"


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["tailrace", *words])
    with pytest.raises(SystemExit) as found:
        command.main()
    code = found.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ProcessStartError("cannot start python: Too many open files"), "or `ulimit -n`"),
        (OSError(errno.EMFILE, "Too many open files", "lock"), "lock: Too many open files: raise"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "or raise `ulimit -u`"),
        (RuntimeError("can't start new thread"), "can't start new thread: end other processes"),
        (OSError(errno.ENOLCK, "No locks available", "lock"), "a file system with locks"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "this machine: Cannot allocate memory: free"),
    ],
)
def test_a_refusal_of_the_system_is_told_in_one_line_with_its_remedy(
    error: Exception,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(command, "app", refuse)
    assert ended(monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert told in said
    assert said.count("\n") == 1


def test_an_error_of_ours_is_no_refusal_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command, "app", fail)
    monkeypatch.setattr(sys, "argv", ["tailrace"])
    with pytest.raises(RuntimeError, match="a bug"):
        command.main()


def test_a_command_in_a_deleted_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert ended(monkeypatch, "train", "frozen_lake") == 2
    assert "has been deleted: change to another one" in capsys.readouterr().err


@pytest.fixture
def odd_signals() -> Iterator[None]:
    """Signals as some supervisors and scripts leave them to what they start."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("odd_signals")
def test_exit_codes_of_children_are_seen_and_signals_reach_them_whoever_starts_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "app", lambda: sys.exit(0))
    assert ended(monkeypatch) == 0
    assert os.waitstatus_to_exitcode(os.system("exit 3")) == 3
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        child.terminate()
        try:
            assert child.wait(60) == -signal.SIGTERM
        finally:
            child.kill()


def test_a_folder_of_another_user_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", str(LAKE), "--checkpoint", "~no-such-user/step_1", "--to", "lake")
    assert ended(monkeypatch, *words) == 2
    assert "--checkpoint ~no-such-user/step_1 is no model directory" in capsys.readouterr().err


def test_no_run_goes_on_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").write_text("1")

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert RunFolder(tmp_path).holder == 0


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/job_7/step_0", {"job_7/memory.max": "5000000", "job_7/cpu.max": "150000 100000"}),
        ("0::/", {"memory.max": "5000000", "cpu.max": "100000 100000"}),
        (
            "4:memory:/slurm/job_7\n3:cpu,cpuacct:/slurm/job_7",
            {
                "memory/slurm/memory.limit_in_bytes": "5000000",
                "cpu/slurm/job_7/cpu.cfs_quota_us": "100000",
                "cpu/slurm/job_7/cpu.cfs_period_us": "100000",
            },
        ),
        (  # as in a container that sees its groups by their names outside
            "4:memory:/docker/7\n3:cpu:/docker/7",
            {
                "memory/memory.limit_in_bytes": "5000000",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_a_job_s_memory_and_processors_are_those_of_its_groups(
    own: str, files: dict[str, str], tmp_path: Path
) -> None:
    groups, names = tmp_path / "groups", tmp_path / "own"
    names.write_text(own + "\n")
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content + "\n")
    assert usable_memory_bytes(groups, names) == 5_000_000
    assert num_usable_cores(groups, names) == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max", "cpu.max": "max 100000"},
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_without_a_limit_memory_and_processors_are_the_machine_s(
    files: dict[str, str], tmp_path: Path
) -> None:
    names = tmp_path / "own"
    names.write_text("4:memory:/\n3:cpu:/\n0::/\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory_bytes(tmp_path, names) == everything
    assert num_usable_cores(tmp_path, names) == len(os.sched_getaffinity(0))


def test_a_lock_that_another_start_deletes_is_no_lock_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that begin at once with `--overwrite`, one waits while the other one deletes."""
    theirs = take_lock(tmp_path)

    def end_deletion(_pause_s: float) -> None:
        (tmp_path / "lock").unlink(missing_ok=True)
        theirs.close()

    monkeypatch.setattr(time, "sleep", end_deletion)
    with take_lock(tmp_path), pytest.raises(RunGoesOnError):
        take_lock(tmp_path)


_TOLD = """
from rich.text import Text
from tailrace_cli.console import stderr, tell
for number in range(1000):
    tell("a notice of a run, which goes on")
    stderr.print(Text(str(number)))
print("the run has ended")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_notices_that_no_disk_takes_end_no_run_and_are_not_kept() -> None:
    """As of `nohup tailrace train 2> log` on a disk that becomes full: the run waits for room on it."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", _TOLD], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.stdout == "the run has ended\n"


async def test_a_server_that_ends_at_its_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for a slow start; what the server said is told with its log."""
    monkeypatch.setattr(servers, "START_TIMEOUT_S", 600.0)
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\necho cannot allocate memory\nexit 1\n")
    binary.chmod(0o755)
    settings = [f"output_dir={tmp_path}", f"cluster.nats_server_binary={binary}"]
    cluster = LocalCluster(load(LAKE / "experiment.yaml", settings))
    with pytest.raises(
        ConfigError, match=r"nats ended at once; its log ends:\n(.*\n)*.*allocate memory"
    ):
        await cluster.start()
    await cluster.stop()


_STARTED = """
import asyncio, sys
from pathlib import Path
from tailrace.config import ConfigError
from tailrace_cli.cluster.local import LocalCluster, RunGoesOnError, take_lock
from tailrace_cli.experiment import load

async def main():
    async with LocalCluster(load(Path(sys.argv[1]), ["cluster.nats_server_binary=none"])):
        pass

try:
    asyncio.run(main())
except ConfigError as error:
    print(error)
"""


def test_a_run_s_experiment_is_written_whatever_the_locale_is(tmp_path: Path) -> None:
    judge = {"base_url": "http://127.0.0.1:9", "model": "m", "prompt": "Größe? {response}"}
    content = yaml.safe_load((LAKE / "experiment.yaml").read_text(encoding="utf-8"))
    content |= {"output_dir": str(tmp_path), "exp_name": "run"}
    content["reward"] = {"rewards": [{"name": "size", "kind": "judge", "judge": judge}]}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    started = subprocess.run(
        [sys.executable, "-c", _STARTED, str(path)],
        env={**os.environ, **ascii_alone}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "cluster.nats_server_binary: none is no program" in started.stdout
    assert "Größe?" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
