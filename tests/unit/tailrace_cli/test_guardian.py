"""End of everything after the end of the command that started it."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tailrace_cli.cluster import guardian
from tailrace_cli.cluster.guardian import sweep
from tests.world.processes import ENDED_WITHIN_S, handles, outlasting

_COMMAND = """
import asyncio, sys, time
from pathlib import Path
from tailrace_cli.cluster.guardian import Guardian
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.supervisor import Supervisor

HUNG = "import os, signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);" \
    "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); time.sleep(600)"

async def main():
    made = Supervisor(Path(sys.argv[1]), max_restarts=1, restart_window_s=9, guardian=Guardian("gone"))
    for name in ("hung", "stopped"):
        await made.start(ProcessSpec(name, [sys.executable, "-c", HUNG], {"PATH": "/usr/bin:/bin"}))
    logs = [Path(sys.argv[1]) / f"{name}.log" for name in ("hung", "stopped")]
    while not all(log.read_text().endswith("\\n") for log in logs):
        await asyncio.sleep(0.01)
    print(*made.pids.values(), *(log.read_text().strip() for log in logs), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


_STUBBORN = """
import os, signal, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""

_HOLDER = """
import fcntl, os, signal, sys, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = b"1" * (64 << 20)  # it takes its time to go
segment = open(sys.argv[1], "wb")
fcntl.flock(segment, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_hung_child_does_not_outlive_its_killed_parent(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in command.stdout.readline().split()]
    assert len(processes) == 4
    processes[1].suspend()
    with handles(processes) as found:
        command.kill()
        assert outlasting(found, time.monotonic() + ENDED_WITHIN_S) == set()
    command.wait()


def test_what_has_to_be_killed_is_so_within_the_two_seconds_that_children_outlive_their_parent() -> (
    None
):
    assert guardian.TERM_S <= 1.0


def test_a_slow_end_does_not_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "_CLOSE_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        made = guardian.Guardian("slow")
        made.watch(stubborn.pid)
        made.close()  # it waits for a second before it kills
        assert stubborn.poll() is None
        assert stubborn.wait(60) == -signal.SIGKILL


def test_logs_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    test_a_hung_child_does_not_outlive_its_killed_parent(tmp_path / "logs")
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()} == {0o600}


def test_without_dev_shm_the_memory_that_the_temporary_folder_holds_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "tailrace.temporary.publisher.1").touch()
    guardian.Guardian("temporary").close()
    assert not [*tmp_path.iterdir()]


def test_the_shared_memory_of_a_process_that_had_to_be_killed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(guardian, "_CLOSE_S", 60.0)
    segment = tmp_path / "tailrace.killed.learner.1"
    argv = [sys.executable, "-c", _HOLDER, str(segment)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        made = guardian.Guardian("killed")
        made.watch(holder.pid)
        made.close()
        assert holder.wait() == -signal.SIGKILL
    assert not segment.exists()


def test_shared_memory_of_the_run_goes_and_that_of_others_stays(tmp_path: Path) -> None:
    gone = ("tailrace.mine.publisher.1", ".tailrace.mine.publisher.2")
    kept = ("tailrace.mine2.publisher.1", "tailrace.mine.vault.held", "other")
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    for name in ("tailrace-weights-dead", "tailrace-weights-held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    held = [
        (tmp_path / name).open("rb")
        for name in ("tailrace.mine.vault.held", "tailrace-weights-held/lock")
    ]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    sweep("mine", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "tailrace-weights-held"])
    for file in held:
        file.close()
