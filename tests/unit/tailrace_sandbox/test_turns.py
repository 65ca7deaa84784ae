"""How soon the process that watches a call runs when it wakes."""

import platform
import subprocess
import sys

import pytest

_TURNS = """
import ctypes, os, struct
from tailrace_sandbox.engine import kernel

def turn_ns():
    attributes = ctypes.create_string_buffer(56)
    numbers = {"x86_64": 315, "aarch64": 275}
    assert ctypes.CDLL(None).syscall(numbers[os.uname().machine], 0, attributes, 56, 0) == 0
    return struct.unpack_from("=Q", attributes, 24)[0], os.getpriority(os.PRIO_PROCESS, 0)

os.nice(3)
kernel.run_in_short_turns()
print(*turn_ns(), flush=True)
if os.fork() == 0:
    print(*turn_ns(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="Linux before 6.12 has one turn",
)
def test_a_process_that_watches_runs_in_short_turns_and_one_that_it_forks_does_not() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _TURNS], capture_output=True, check=True, timeout=60
    )
    (own_ns, own_nice), (forked_ns, forked_nice) = (
        map(int, line.split()) for line in printed.stdout.splitlines()
    )
    assert own_ns == 100_000
    assert forked_ns > own_ns
    assert own_nice == forked_nice >= 3
