"""Sessions inside of a container, by the program that runs there; here without the container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tailrace_sandbox.engine import guest

_CALL = (
    "import sys; from tailrace_sandbox.engine import guest; "
    "guest.SOCKET, guest.STATUS, guest._END = sys.argv[1:4]; guest.call_session(30.0)"
)
Call = Callable[[str], subprocess.CompletedProcess[str]]
BEGIN = (
    "import os, signal\ndef late(*_): raise TimeoutError('too late')\n"
    "signal.signal(signal.SIGUSR1, late)\nx = 5\nprint(os.getpid())"
)


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    paths = [str(tmp_path / name) for name in ("socket", "status", "end")]
    sessions: list[int] = []

    def made(code: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", _CALL, *paths]
        done = subprocess.run(argv, input=code, capture_output=True, text=True, timeout=60, check=False)
        if code == BEGIN:
            sessions.append(int(done.stdout))
        return done

    yield made
    for pid in filter(psutil.pid_exists, sessions):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "told"), [(signal.SIGUSR1, "too late"), (signal.SIGINT, "")])
def test_a_signal_between_two_pieces_is_shown_and_the_session_goes_on(
    number: int, told: str, call: Call
) -> None:
    os.kill(int(call(BEGIN).stdout), number)
    after = call("x")
    assert (after.stdout, after.returncode) == ("5\n", 0)
    assert told in after.stderr
    assert bool(after.stderr) == bool(told)


def test_a_session_that_ended_between_two_pieces_says_so(call: Call, tmp_path: Path) -> None:
    pid = int(call(BEGIN).stdout)
    guard = psutil.Process(pid).parent()
    assert guard is not None
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([guard], timeout=60)
    assert call("x").returncode == guest.LOOK_INTO_STATUS
    assert (tmp_path / "status").read_text() == "-9 0 1"
