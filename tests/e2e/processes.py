"""A `tailrace` command in the background: wait for what it shows, look at its processes, end it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.runs import environment

ENDS_WITHIN_S = 120.0


class Background:
    """A running command; its output goes to `log`."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, env=environment(), stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    def wait_until(self, holds: Callable[[], bool], deadline_s: float = 300.0) -> None:
        """Return once `holds()`; fail when the command ends first or the deadline passes."""
        end = time.monotonic() + deadline_s
        while not holds():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < end, self.printed
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        """All its processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ends(self, deadline_s: float = ENDS_WITHIN_S) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running: {self.printed}") from error

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[Background]:
    """The command, drained at the end if it is still running."""
    background = Background(argv, log)
    try:
        yield background
    finally:
        if background.process.poll() is None:
            background.interrupt()
            try:
                background.process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                background.process.kill()
                background.process.wait()


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; orphans count until the first process of the machine has taken note."""
    _, alive = psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)
    return alive


def num_steps(run_dir: Path) -> int:
    """Optimizer steps that `events.jsonl` tells of."""
    events = run_dir / "events.jsonl"
    return events.read_bytes().count(b'"step_finished"') if events.exists() else 0


def log_lines(run_dir: Path) -> list[dict[str, object]]:
    """Every structured line of every service's log; a full disk leaves torn ones, which are skipped."""
    found = []
    for path in sorted((run_dir / "logs").glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]
