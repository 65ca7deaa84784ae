"""A run whose terminal is closed ends as after Ctrl-C."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

# `argv`: a file for how it ended, "plain" or "nohup", seconds, a pipe that says when it is up.
PROGRAM = """
import asyncio, os, signal, sys, traceback
from tailrace_cli.commands.cluster_run import _interruption
from tailrace_cli.console import tell
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "nohup" else signal.SIG_DFL)

async def main():
    interrupted = _interruption()
    asyncio.get_running_loop().call_later(float(sys.argv[3]), interrupted.set)
    os.write(int(sys.argv[4]), b"up")
    await interrupted.wait()
    tell("this terminal is gone")
    return "ended in order"

try:
    told = asyncio.run(main())
except BaseException:
    told = traceback.format_exc()
with open(sys.argv[1], "w") as file:
    file.write(told)
"""


@pytest.mark.parametrize(("how", "wait_s"), [("plain", "60"), ("nohup", "0.5")])
def test_a_run_without_its_terminal_ends_in_order(tmp_path: Path, how: str, wait_s: str) -> None:
    told = tmp_path / "told"
    up, says_up = os.pipe()
    os.set_inheritable(says_up, True)
    child, terminal = pty.fork()
    if not child:
        if how == "nohup":  # which sends the output elsewhere, too
            elsewhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(elsewhere, 2)
        argv = [sys.executable, "-c", PROGRAM, str(told), how, wait_s, str(says_up)]
        os.execv(sys.executable, argv)
    os.close(says_up)
    said = os.read(up, 2)
    os.close(up)
    assert said == b"up", os.read(terminal, 10_000).decode()
    os.close(terminal)
    status = os.waitpid(child, 0)[1]
    assert (status, told.read_text()) == (0, "ended in order")
