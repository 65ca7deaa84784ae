"""The fork gate on real processes: a zygote of its own that counts at each request."""

# ruff: noqa: E501 - programs read better with lines as they are

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace_sandbox.adapters.place import probe

SERVICES = Path(__file__).resolve().parents[3] / "services"
LIMIT = 8
_ZYGOTE = """
import os, platform, select, socket, sys
sys.path.insert(0, {services!r})
from tailrace_sandbox.core.policy import fork_gate_program
from tailrace_sandbox.engine import kernel, processes
from tailrace_sandbox.engine.forks import ForkGate
def call():
{code}
kernel.adopt_orphans()
ours, theirs = socket.socketpair()
first = os.fork()
if first == 0:
    os.setsid()
    kernel.gain_no_privileges()
    listener = kernel.install_listened_filter(fork_gate_program(platform.machine()))
    socket.send_fds(theirs, [b"0"], [listener])
    os.close(listener); ours.close(); theirs.close()
    try: call()
    finally: os._exit(9)
listener = socket.recv_fds(ours, 1, 1)[1][0]
gate, most, poll = ForkGate(listener, {limit}), 0, select.poll()
poll.register(listener)
while (ended := os.waitpid(first, os.WNOHANG))[0] == 0:
    wait_s = gate.next_event_s()
    for _, event in poll.poll(1 if wait_s >= 0 else 20):
        if event & select.POLLIN: gate.receive()
    gate.decide()
    most = max(most, sum(len(tasks) for _, tasks in processes.descendants(os.getpid())))
processes.end(first)
print(most, os.waitstatus_to_exitcode(ended[1]))
"""


def run(code: str) -> tuple[int, int]:
    """Most processes and threads that there were at once, and the exit code of the first."""
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    source = _ZYGOTE.format(services=str(SERVICES), code=indented, limit=LIMIT)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    most, exit_code = map(int, done.stdout.split())
    return most, exit_code


@pytest.fixture(autouse=True)
async def kernel_has_listeners() -> None:
    if not (await probe(sys.executable)).counts_forks:
        pytest.skip("this kernel, or a filter around the tests, allows no listener of system calls")


BOMBS = {
    "processes": "import time\nend = time.time() + 2\nwhile time.time() < end:\n    try: os.fork()\n    except BlockingIOError: pass\nos._exit(0)",
    "a chain": "import time\nend = time.time() + 2\nkept = 0\nwhile time.time() < end:\n    try: pid = os.fork()\n    except BlockingIOError: continue\n    if pid == 0 and os.fork() == 0: time.sleep(0.2); os._exit(0)\nos._exit(0)",
    "zombies": "import time\nend = time.time() + 2\nwhile time.time() < end:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except BlockingIOError: pass\nos._exit(0)",
    "threads": "import threading, time\nend = time.time() + 2\nwhile time.time() < end:\n    try: threading.Thread(target=time.sleep, args=(0.05,), daemon=True).start()\n    except RuntimeError: pass\nos._exit(0)",
    "forks under a storm of alarms": "import signal, time\nsignal.signal(14, lambda *a: None)\nsignal.setitimer(0, 0.005, 0.005)\nend = time.time() + 2\nwhile time.time() < end:\n    try: os.fork()\n    except (BlockingIOError, InterruptedError): pass\nos._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_call_never_has_more_processes_than_its_limit_with_a_bomb_of(name: str) -> None:
    most, exit_code = run(BOMBS[name])
    assert exit_code == 0
    assert LIMIT // 2 <= most <= LIMIT, "it comes near the limit, and no further"


def test_a_call_has_all_processes_of_its_limit_again_and_again() -> None:
    code = (
        f"import signal\nfor _ in range(30):\n"
        f"    pids = []\n    for _ in range({LIMIT} - 1):\n"
        "        pid = os.fork()\n        if pid == 0: signal.pause()\n        pids.append(pid)\n"
        "    try: os.fork(); os._exit(1)\n    except BlockingIOError: pass\n"
        "    for pid in pids: os.kill(pid, 9); os.waitpid(pid, 0)\nos._exit(0)"
    )
    assert run(code) == (LIMIT, 0)


def test_programs_that_a_call_starts_are_counted_and_forgotten() -> None:
    code = (
        "import subprocess\nfor _ in range(60): subprocess.run(['/bin/true'], check=True)\nos._exit(0)"
    )
    most, exit_code = run(code)
    assert exit_code == 0
    assert most <= 2
