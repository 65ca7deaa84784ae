"""Runs on disk: where they are, whether they go on, and how they ended.

A run goes on while a process holds the lock `state/lock`, whose content is that process's id; so a run
whose machine died is never shown as running. How a run ended is the newest of its start and end events.
"""

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from tailrace.config import ConfigError
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.summary import NO_BASELINES, Baselines
from tailrace_protos.event import Event, EventBody, RunFailed, RunFinished, RunStarted

State = Literal["running", "finished", "failed", "interrupted", "not started"]

_MARKS = (b'"type":"run_started"', b'"type":"run_finished"', b'"type":"run_failed"')
_decoder = msgspec.json.Decoder(Event)


class _Folders(msgspec.Struct):
    """Folders that a run's settings may put elsewhere; empty: in the run's directory."""

    logging_dir: str = ""
    render_save_dir: str = ""


@dataclass(frozen=True)
class RunFolder:
    """One run's directory."""

    path: Path

    @property
    def holder(self) -> int:
        """Process that drives the run now; 0: none does."""
        lock = self.path / "state" / "lock"
        if not lock.exists():
            return 0
        with lock.open() as file:
            try:  # shared: two that look do not take each other for the run
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().strip() or 0)
        return 0

    def state(self) -> tuple[State, str]:
        """State of the run, and what is to be said about it."""
        if holder := self.holder:
            return "running", f"process {holder}"
        match self._newest_mark():
            case RunFinished(reason=reason):
                return "finished", reason
            case RunFailed(reason=reason):
                return "failed", reason
            case RunStarted():
                return "interrupted", "continue it with resume_from_checkpoint=true"
        return "not started", ""

    def _newest_mark(self) -> EventBody | None:
        events = self.path / "events.jsonl"
        newest: EventBody | None = None
        if events.exists():
            with events.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n") and any(mark in line for mark in _MARKS):
                        newest = read_event(events, line).body
        return newest

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Resolved experiment of the run, as its `config.yaml` has it."""
        path = self.path / "config.yaml"
        try:
            found = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise DamagedRunError(path, error) from error
        if not isinstance(found, dict):
            raise DamagedRunError(path, "it holds no keys")
        return found

    @property
    def logs_dir(self) -> Path:
        """Folder with the logs of the run's processes."""
        given = self._run.logging_dir
        return Path(given) / self.path.name if given else self.path / "logs"

    @property
    def renders_dir(self) -> Path:
        """Folder with pictures of episodes."""
        given = self._run.render_save_dir
        return Path(given) if given else self.path / "renders"

    @property
    def _run(self) -> "_Folders":
        return msgspec.convert(self.settings, _Folders)

    @property
    def baselines(self) -> Baselines:
        """Baselines that the run measured; none before it has."""
        path = self.path / "baselines.json"
        return read_json(path) if path.exists() else NO_BASELINES

    @property
    def eval_temperature(self) -> float:
        """Temperature of the run's evaluations; of named ones, that of the first."""
        first: dict[str, Any] = next(iter((self.settings.get("evaluations") or {}).values()), {})
        if first.get("temperature") is not None:
            return float(first["temperature"])
        agents = self.settings.get("agents") or {}
        return float((agents.get("eval_generating_args") or {}).get("temperature", 1.0))


def read_event(path: Path, line: bytes) -> Event:
    """Event of a line of the log at `path`."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise DamagedRunError(path, error) from error


def read_json(path: Path) -> Any:
    """Content of a file of a run."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DamagedRunError(path, error) from error


def find_run(name: str, output_dir: str) -> RunFolder:
    """Run of this name below `output_dir`, or in this directory. ConfigError: there is none."""
    for path in (Path(name), Path(output_dir) / name):
        if (path / "config.yaml").is_file():
            return RunFolder(path if path.name else path.absolute())  # `.` has no name
    known = ", ".join(run.path.name for run in runs_in(output_dir)) or "none"
    raise ConfigError(
        f"no run {name!r} in {output_dir} (runs there: {known}): give its directory, or --output-dir"
    )


def runs_in(output_dir: str) -> Iterator[RunFolder]:
    """Runs below a directory, by name."""
    for config in sorted(Path(output_dir).glob("*/config.yaml")):
        yield RunFolder(config.parent)
