"""When a paused call counts as one that goes on running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import processes
from tailrace_sandbox.engine.call import ForkedCall
from tailrace_sandbox.engine.inspection import Inspection
from tailrace_sandbox.engine.machine import Gauges

Looks = list[dict[str, int | None]]
STARVED: Looks = [{"7": 5_000}] * 50  # it waits for a processor, and has yet to hear of the stop
SPINNING: Looks = [{"7": 5_000 + look} for look in range(50)]
UNKNOWN: Looks = [{"7": None}] * 50  # a kernel without the times


@pytest.fixture
def call(tmp_path_factory: pytest.TempPathFactory) -> ForkedCall:
    folder = str(tmp_path_factory.mktemp("call"))
    inspection = Inspection(folder, Limits(), Gauges(), None, tells_room=True, limits_processes=True)
    return ForkedCall(0, inspection, is_session=True, deadline_s=None)


@pytest.mark.parametrize(
    ("looks", "reason"),
    [(STARVED, ""), (SPINNING, "restless"), (UNKNOWN, "restless"), (SPINNING[:2] + STARVED, "")],
    ids=["starved", "spinning", "unknown", "stops-late"],
)
def test_a_paused_call_ends_if_it_runs_and_not_if_a_busy_machine_keeps_it_from_stopping(
    looks: Looks, reason: str, call: ForkedCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: Iterator[dict[str, int | None]] = iter([*looks, {}])
    monkeypatch.setattr(processes, "awake", lambda pid: next(left))
    monkeypatch.setattr(processes, "send", lambda group, number: None)
    call.pause()
    found = ""
    for _ in range(len(looks)):
        call.look_s = 0.0
        found = found or call.breach()
    assert found == reason


def test_a_process_that_runs_is_awake_with_the_time_that_it_has_run_and_a_stopped_one_is_not() -> None:
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    try:
        ran_ns = processes.awake(os.getpid())[str(pid)]
        while ran_ns is not None and processes.awake(os.getpid())[str(pid)] == ran_ns:
            pass
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert str(pid) not in processes.awake(os.getpid())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def status(state: str, pending: int = 0, shared: int = 0, blocked: int = 0) -> bytes:
    """The lines of a `/proc/*/status` that tell of signals."""
    masks = f"SigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n"
    return f"Name:\tpython\nState:\t{state}\nThreads:\t1\n{masks}SigIgn:\t0\n".encode()


INTERRUPT = 1 << signal.SIGINT - 1


@pytest.mark.parametrize(
    ("found", "is_starved"),
    [
        (status("R (running)", shared=INTERRUPT), True),
        (status("R (running)", pending=INTERRUPT), True),
        (status("R (running)"), False),
        (status("R (running)", shared=INTERRUPT, blocked=INTERRUPT), False),
        (status("R (running)", shared=1 << signal.SIGTERM - 1), False),
        (status("S (sleeping)", shared=INTERRUPT), False),
        (status("T (stopped)", shared=INTERRUPT), False),
        (b"", False),
    ],
    ids=["starved", "its-thread", "received", "blocked", "another", "sleeps", "stopped", "ended"],
)
def test_the_time_to_end_after_an_interrupt_begins_when_it_is_received(
    found: bytes, is_starved: bool, call: ForkedCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(processes, "read", lambda path: found)
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append(number))
    call.look_s = float("inf")
    ends = []
    for _ in range(20):
        call.deadline_s = 0.0
        ends.append(call.breach())
    assert told == [signal.SIGINT]
    assert ends.index("wall_clock") == (5 if is_starved else 1), "an attack may last five times as long"


def test_a_process_has_received_what_it_had_a_processor_for() -> None:
    code = "import signal\nsignal.signal(2, lambda *_: None)\nprint('up', flush=True)\nwhile True: pass"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGINT)
            while processes.has_yet_to_receive(process.pid, signal.SIGINT):
                pass
            assert process.poll() is None
        finally:
            process.kill()
