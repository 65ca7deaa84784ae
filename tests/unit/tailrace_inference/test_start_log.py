"""Cause of a start that failed, in the log of a server's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from tailrace_inference.adapters.start_log import StartLog
print("ValueError: of an earlier start", file=sys.stderr, flush=True)
log = StartLog()
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", sys.argv[1]])
print(log.told(RuntimeError(sys.argv[2])))
"""
POINTER = "Engine core initialization failed. See root cause above."
INSPECTED = "Architectures ['X'] failed to be inspected.\nPlease check the logs for more details."
OF_VLLM = """\
(EngineCore pid=12) ERROR 11-26 03:00:00 [core.py:1510] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-26 03:00:00 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-26 03:00:00 [core.py:1510]   File "core.py", line 7, in run
(EngineCore pid=12) ERROR 11-26 03:00:00 [core.py:1510] ValueError: No available memory for the cache.
(EngineCore pid=12) INFO 11-26 03:00:00 [core.py:1499] shutdown
"""


@pytest.mark.parametrize(
    ("said", "error", "cause"),
    [
        (OF_VLLM, POINTER, "ValueError: No available memory for the cache."),
        (
            "Traceback\n  File x\ntorch.OutOfMemoryError: of a device\n",
            POINTER,
            "torch.OutOfMemoryError: of a device",
        ),
        ("INFO all is well\n", POINTER, POINTER),
        (OF_VLLM, INSPECTED, "ValueError: No available memory for the cache."),
        (OF_VLLM, "1 validation error\n  a setting is wrong", "1 validation error a setting is wrong"),
    ],
)
def test_the_newest_exception_since_the_start_is_the_cause_that_an_error_points_to(
    said: str, error: str, cause: str, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", PROGRAM, said, error]
    with (tmp_path / "log").open("ab") as log:
        told = subprocess.run(argv, stdout=subprocess.PIPE, stderr=log, check=True)
    assert told.stdout.decode().strip() == cause


def test_a_log_that_is_no_file_tells_none() -> None:
    argv = [sys.executable, "-c", PROGRAM, OF_VLLM, POINTER]
    assert subprocess.run(argv, capture_output=True, check=True).stdout.decode().strip() == POINTER
