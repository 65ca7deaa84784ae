"""Runs on disk: where they are, whether they go on, and how they ended.

A run goes on while a process holds the lock `state/lock`, whose content is that process's id; so a run
whose machine died is never shown as running. How a run ended is the newest of its start and end events.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

from tailrace.config import ConfigError
from tailrace_cli.damaged import DamagedRunError, decoded_line
from tailrace_cli.summary import NO_BASELINES, Baselines
from tailrace_protos.event import Event, EventBody, RunFailed, RunFinished, RunStarted

T = TypeVar("T")
State = Literal["running", "finished", "failed", "interrupted", "not started"]

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_MARKS = (b'"type":"run_started"', b'"type":"run_finished"', b'"type":"run_failed"')
_BLOCK_BYTES = 1 << 20
_decoder = msgspec.json.Decoder(Event)


class _Sampling(msgspec.Struct):
    temperature: float | None = None


class _Agents(msgspec.Struct):
    eval_generating_args: _Sampling | None = None


class _Read(msgspec.Struct):
    """Settings of a run that commands read. Folders may be elsewhere; empty: in the run's directory."""

    logging_dir: str = ""
    render_save_dir: str = ""
    evaluations: dict[str, _Sampling] | None = None
    agents: _Agents | None = None


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
            except OSError as error:  # no locks on this file system: no run can go on there
                if error.errno not in _NO_LOCKS:
                    raise
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

    def is_driven_by(self, process: int) -> bool:
        """Tell whether this process of this machine holds the lock.

        The lock also shows that of another machine on a shared disk, or of a container, by a number
        that is another process's here.
        """
        lock = (self.path / "state" / "lock").stat()
        for opened in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(opened.stat(), lock):
                    return True
        return False

    def _newest_mark(self) -> EventBody | None:
        events = self.path / "events.jsonl"
        if events.exists():
            for line in lines_from_end(events):
                if any(mark in line for mark in _MARKS):
                    return read_event(events, line).body
        return None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Resolved experiment of the run, as its `config.yaml` has it."""
        path = self.path / "config.yaml"
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
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

    @cached_property
    def _run(self) -> _Read:
        try:
            return msgspec.convert(self.settings, _Read)
        except msgspec.ValidationError as error:
            raise DamagedRunError(self.path / "config.yaml", error) from error

    @property
    def baselines(self) -> Baselines:
        """Baselines that the run measured; none before it has."""
        path = self.path / "baselines.json"
        return read_json(path, dict[str, dict[str, float]]) if path.exists() else NO_BASELINES

    @property
    def players(self) -> list[tuple[float, str]]:
        """Success and name of simple players; of named evaluations, those of the first."""
        found = self.baselines
        if named := self._run.evaluations:
            found = {name: found.get(name, {}) for name in [*named][:1]}
        return [(rate, player) for of_tasks in found.values() for player, rate in of_tasks.items()]

    @property
    def eval_temperature(self) -> float:
        """Temperature of the run's evaluations; of named ones, that of the first."""
        agents = self._run.agents or _Agents()
        of_all = agents.eval_generating_args or _Sampling()
        for sampling in (*[*(self._run.evaluations or {}).values()][:1], of_all):
            if sampling.temperature is not None:
                return sampling.temperature
        return 1.0


def read_event(path: Path, line: bytes) -> Event:
    """Event of a line of the log at `path`."""
    return decoded_line(_decoder, line, path)


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, the last one first; a torn one at its end is left out."""
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        is_end = True
        while begin:
            end, begin = begin, max(0, begin - _BLOCK_BYTES)
            file.seek(begin)
            first, *lines = (file.read(end - begin) + rest).split(b"\n")
            if is_end and lines:
                lines.pop()
                is_end = False
            yield from (line + b"\n" for line in reversed(lines))
            rest = first
        if not is_end:
            yield rest + b"\n"


def read_json(path: Path, kind: type[T]) -> T:
    """Content of a file of a run."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind)
    except (ValueError, RecursionError) as error:
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
