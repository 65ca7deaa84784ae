"""A run of the demo in the background whose processes are killed while its events are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).parents[1]
VICTIMS = {  # name -> names of the program
    "scheduler": ("tailrace_scheduler",),
    "inference": ("tailrace_inference",),
    "agents": ("tailrace_agents",),
    "reward": ("tailrace_reward",),
    "learner": ("tailrace_learner",),
    "weight_sync": ("tailrace_weight_sync",),
    "nats-server": ("nats-server",),
    "redis-server": ("redis-server", "valkey-server"),
}
DEADLINE_S = 60.0
# Failures of long ago do not slow the restart of the next one, as where they are rare. The model hardly
# learns: its games stay as long as they are, and their groups as different.
SETTINGS = (
    "exp_name=recovery",
    "max_steps=1000000",
    "eval_steps=0",
    "save_steps=20",
    "learner.warm_start.num_steps=40",
    "learner.training_args.learning_rate=1e-6",
    "scheduler.max_untrained_steps=0",
    "agents.custom_envs.frozen_lake.env_config.invalid_action_penalty=0.1",
    "cluster.num_inference_servers=2",
    "cluster.num_agents_workers=2",
    "cluster.restart_window_s=2",
)


class Line(msgspec.Struct):
    """A line of `events.jsonl`."""

    unix_s: float
    service: str
    body: dict[str, Any]


def find(parent: psutil.Process, names: tuple[str, ...]) -> psutil.Process | None:
    """The newest child that runs one of these programs; None while it is being restarted."""
    found = []
    for child in parent.children(recursive=True):
        try:
            words = " ".join(child.cmdline()).split()  # redis-server rewrites its arguments as one
            if any(word.rpartition("/")[2] in names for word in words):
                found.append((child.create_time(), child))
        except psutil.Error:
            continue
    return max(found, key=lambda one: one[0])[1] if found else None


class EventTail:
    """Reads the lines that `events.jsonl` grows by."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "events.jsonl"
        self._decoder = msgspec.json.Decoder(Line)
        self._offset = 0
        self._num_steps = 0
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Returns the new lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [self._decoder.decode(line) for line in whole.splitlines()]
        self.lines += lines
        self._num_steps += sum(line.body["type"] == "step_finished" for line in lines)
        return lines

    @property
    def num_steps(self) -> int:
        """Optimizer steps finished so far."""
        self.read()
        return self._num_steps


class LiveRun:
    """A `tailrace train` in the background, its processes and its events."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.events = EventTail(run_dir)
        self._log = log

    def wait_until(self, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Return once `holds()`; raises `RuntimeError` when the run ends, `TimeoutError`."""
        end_s = time.monotonic() + deadline_s
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the run has ended:\n{self._log.read_text(errors='replace')[-4000:]}"
                )
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {deadline_s:g} s:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.05)

    def wait_for_steps(self, count: int, deadline_s: float = DEADLINE_S) -> None:
        """Return after so many more optimizer steps."""
        wanted = self.events.num_steps + count
        self.wait_until(lambda: self.events.num_steps >= wanted, deadline_s)

    def signal(self, victim: str, number: int) -> psutil.Process:
        """Send a signal to the process of a victim, of `VICTIMS`, once it runs; returns its process."""
        found: list[psutil.Process] = []

        def sent() -> bool:
            child = find(psutil.Process(self.process.pid), VICTIMS[victim])
            if child is None:
                return False
            try:
                child.send_signal(number)
            except psutil.NoSuchProcess:
                return False
            found.append(child)
            return True

        self.wait_until(sent)
        return found[0]


@contextmanager
def training(
    folder: Path, *settings: str, environ: Mapping[str, str] | None = None
) -> Iterator[LiveRun]:
    """A run of the demo with these settings, and further variables; ends it with Ctrl-C."""
    argv = [sys.executable, "-m", "tailrace_cli", "train", "examples/frozen_lake"]
    argv += [*SETTINGS, f"output_dir={folder}", *settings]
    path = folder / "printed.txt"
    with path.open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
        )
        try:
            yield LiveRun(process, folder / "recovery", path)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
