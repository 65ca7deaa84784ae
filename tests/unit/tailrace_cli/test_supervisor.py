"""Supervision of real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import psutil
import pytest

from tailrace.config import ConfigError
from tailrace_cli.cluster import supervisor as supervisor_module
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.supervisor import Supervisor, _Failures
from tailrace_cli.config import ClusterConfig
from tests.world.processes import is_alive

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"
STUBBORN = [sys.executable, "-c", f"{DEAF}; time.sleep(600)"]


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", max_restarts=3, restart_window_s=60.0)
    yield made
    await made.stop(list(made.pids), drain_s=0.1)


async def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Poll a condition of another process until it holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_killed_process_is_started_again(supervisor: Supervisor) -> None:
    await supervisor.start(ProcessSpec("sleeper", SLEEPER))
    first = supervisor.pids["sleeper"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pids["sleeper"] != first)
    assert supervisor.num_restarts == {"sleeper": 1}
    assert not supervisor.failed.done()


async def test_files_of_a_process_are_its_owners_alone(supervisor: Supervisor, tmp_path: Path) -> None:
    """Weights, trajectories and checkpoints too: whatever a service writes without a mode."""
    program = (
        f"import os, time; os.chdir({str(tmp_path)!r}); os.mkdir('d'); open('d/f', 'w').close()\n"
        "open('end', 'w').close(); time.sleep(600)"
    )
    spec = ProcessSpec("writer", [sys.executable, "-c", program])
    previous = os.umask(0)
    try:
        await supervisor.start(spec)
    finally:
        os.umask(previous)
    await until((tmp_path / "end").exists)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o600


async def test_a_restart_is_told_with_the_log_and_an_end_for_good_is_not(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(tmp_path, max_restarts=1, restart_window_s=60.0, tell=told.append)
    await supervisor.start(ProcessSpec("broken", [sys.executable, "-c", "raise SystemExit(3)"]))
    await asyncio.wait_for(supervisor.failed, 60)
    assert told == [f"broken ended (exit code 3) and starts again; its log: {tmp_path}/broken.log"]
    await supervisor.stop(["broken"], drain_s=0.1)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "signal SIGKILL: the kernel sends it where memory is used up"),
        (signal.SIGSEGV, "signal SIGSEGV"),
    ],
)
async def test_a_process_that_a_signal_ends_is_told_with_its_name(
    number: signal.Signals, told: str, tmp_path: Path
) -> None:
    notices: list[str] = []
    supervisor = Supervisor(tmp_path, max_restarts=1, restart_window_s=60.0, tell=notices.append)
    program = f"import os; os.kill(os.getpid(), {int(number)})"
    await supervisor.start(ProcessSpec("learner", [sys.executable, "-c", program]))
    error = await asyncio.wait_for(supervisor.failed, 60)
    assert notices[0].startswith(f"learner ended ({told}")
    assert f"learner keeps failing ({told}" in str(error)
    await supervisor.stop(["learner"], drain_s=0.1)


async def test_a_program_that_this_machine_cannot_run_is_named(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """As one of another processor's kind."""
    program = tmp_path / "nats-server"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"^nats: .*/nats-server cannot be run \(Exec format error\)"):
        await supervisor.start(ProcessSpec("nats", [str(program)]))


async def test_a_program_that_is_gone_at_a_restart_fails_the_cluster(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """As a lack of memory or processes does: its service would be missed in silence."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nrm "$0"\n')
    program.chmod(0o755)
    await supervisor.start(ProcessSpec("broken", [str(program)]))
    error = await asyncio.wait_for(supervisor.failed, 60)
    assert "No such file or directory" in str(error)
    await supervisor.stop(["broken"], drain_s=0.1)


def test_the_default_limit_of_restarts_is_reached_by_a_process_that_always_fails_at_once() -> None:
    config = ClusterConfig()
    failures, now_s = _Failures(config.max_restarts, config.restart_window_s, 0), 0.0
    for _ in range(config.max_restarts):
        assert not failures.add(now_s, was_ready=True, expects_progress=False)
        now_s += failures.delay_s
    assert failures.add(now_s, was_ready=True, expects_progress=False)


async def test_a_user_error_is_final_and_carries_the_last_line_of_the_log(
    supervisor: Supervisor,
) -> None:
    program = "import sys; print('error: pretrain: no such model', file=sys.stderr); sys.exit(2)"
    await supervisor.start(ProcessSpec("learner", [sys.executable, "-c", program]))
    error = await asyncio.wait_for(supervisor.failed, 60)
    assert error.exit_code == 2
    assert str(error) == "learner: pretrain: no such model"
    assert supervisor.num_restarts == {}


async def test_a_process_that_keeps_failing_fails_the_cluster_with_its_log(
    supervisor: Supervisor,
) -> None:
    program = "import sys; print('what broke'); sys.exit(1)"
    await supervisor.start(ProcessSpec("broken", [sys.executable, "-c", program]))
    error = await asyncio.wait_for(supervisor.failed, 60)
    assert supervisor.num_restarts == {"broken": 3}
    assert "what broke" in str(error)


@pytest.mark.parametrize(
    ("touches", "expects_progress", "expected"),
    [
        ("", False, "2 times in a row before it was ready"),
        ("touch", True, "2 times without a valid episode or step in between"),
        ("touch", False, "4 times within 60 s"),
    ],
)
async def test_a_service_that_fails_before_it_is_ready_or_without_progress_ends_the_run(
    tmp_path: Path, touches: str, expects_progress: bool, expected: str
) -> None:
    supervisor = Supervisor(
        tmp_path / "logs", max_restarts=3, restart_window_s=60.0, max_failed_starts=2
    )
    supervisor.expects_progress = expects_progress
    ready = tmp_path / "ready" / "broken"
    line = '{"event": "no room", "level": "error", "path": "/x", "run": "r"}'
    program = ["/bin/sh", "-c", f"{touches and f'touch {ready};'} echo '{line}'; exit 1"]
    await supervisor.start(ProcessSpec("broken", program, ready_file=ready))
    error = await asyncio.wait_for(supervisor.failed, 60)
    assert expected in str(error)
    assert str(error).endswith("error no room path=/x")
    assert error.exit_code == 1


async def test_episodes_do_not_forgive_a_learner_that_makes_no_step(tmp_path: Path) -> None:
    supervisor = Supervisor(
        tmp_path / "logs", max_restarts=9, restart_window_s=60.0, max_failed_starts=2
    )
    supervisor.expects_progress = True
    ready = tmp_path / "ready" / "learner"
    program = ["/bin/sh", "-c", f"touch {ready}; exit 1"]
    await supervisor.start(ProcessSpec("learner", program, ready_file=ready))
    while not supervisor.failed.done():
        supervisor.progressed(has_stepped=False)
        await asyncio.sleep(0.01)
    assert "2 times without a valid episode or step in between" in str(supervisor.failed.result())


async def test_progress_forgives_the_ends_before_it(tmp_path: Path) -> None:
    supervisor = Supervisor(
        tmp_path / "logs", max_restarts=4, restart_window_s=60.0, max_failed_starts=2
    )
    supervisor.expects_progress = True
    ready = tmp_path / "ready" / "frail"
    program = ["/bin/sh", "-c", f"touch {ready}; exit 1"]
    await supervisor.start(ProcessSpec("frail", program, ready_file=ready))
    while not supervisor.failed.done():
        supervisor.progressed()
        await asyncio.sleep(0.01)
    assert "5 times within 60 s" in str(supervisor.failed.result())


async def test_stop_ends_a_process_that_ignores_sigterm(supervisor: Supervisor) -> None:
    await supervisor.start(ProcessSpec("stubborn", STUBBORN))
    pid = supervisor.pids["stubborn"]
    await until(lambda: "up" in supervisor.log_path("stubborn").read_text())
    await supervisor.stop(["stubborn"], drain_s=0.2)
    assert not psutil.pid_exists(pid)


async def test_stopped_processes_are_not_restarted(supervisor: Supervisor) -> None:
    await supervisor.start(ProcessSpec("sleeper", SLEEPER))
    pid = supervisor.pids["sleeper"]
    await supervisor.stop(["sleeper"], drain_s=5)
    assert supervisor.pids == {}
    assert not psutil.pid_exists(pid)


async def test_children_end_when_the_supervising_process_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from tailrace_cli.cluster.plan import ProcessSpec
from tailrace_cli.cluster.supervisor import Supervisor
async def main():
    supervisor = Supervisor(Path({str(tmp_path)!r}), max_restarts=1, restart_window_s=1)
    await supervisor.start(ProcessSpec("sleeper", {SLEEPER!r}))
    print(supervisor.pids["sleeper"], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(child))


class StuckProcess:
    """Process that waits inside the kernel: even SIGKILL does not end it."""

    pid, returncode = 4711, None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


async def test_a_process_that_does_not_end_although_it_was_killed_is_left_behind_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "KILLED_S", 0.05)
    told: list[str] = []
    made = Supervisor(tmp_path / "logs", max_restarts=3, restart_window_s=60.0, tell=told.append)
    stuck = StuckProcess()
    ending = made._end_process("learner", cast(asyncio.subprocess.Process, stuck), 0.05)
    await asyncio.wait_for(ending, 60)
    assert stuck.signals == [signal.SIGTERM, signal.SIGKILL]
    assert "learner (process 4711) does not end although it was killed" in told[-1]
