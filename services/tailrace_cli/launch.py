"""Record of how a run was started: `launch.json` has one entry for each start, with versions."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import msgspec

import tailrace
from tailrace.store.connection import without_credentials
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.run_folders import read_json

FILE = "launch.json"
_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "sglang",
    "peft",
    "numpy",
    "msgspec",
    "nats-py",
    "redis",
    "pyzmq",
)
_GIT_TIMEOUT_S = 10.0
_MAX_UNIX_S = 1e11  # of the year 5138


class Launch(msgspec.Struct):
    """One start of a run."""

    unix_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_UNIX_S)]
    command: str
    folder: str
    commit: str
    machine: str
    versions: dict[str, str]


def record_launch(run_dir: Path, folder: Path) -> None:
    """Append an entry to the run's `launch.json`; `folder` holds the experiment file."""
    started = Launch(
        unix_s=time.time(),
        command=_text(command_line(sys.argv)),
        folder=_text(os.getcwd()),
        commit=commit_of(folder),
        machine=f"{platform.node()}, {os.cpu_count()} processors, {platform.platform()}",
        versions={
            "tailrace": tailrace.__version__,
            "python": platform.python_version(),
            **_versions(),
        },
    )
    try:
        launches = [*read_launches(run_dir), started]
    except DamagedRunError:  # a run starts without the record of its starts before
        (run_dir / FILE).replace(run_dir / f"{FILE}.damaged")
        launches = [started]
    part = run_dir / f".{FILE}.part"
    part.touch(0o600)  # the command may hold keys
    part.write_text(json.dumps(msgspec.to_builtins(launches), indent=1) + "\n")
    part.replace(run_dir / FILE)


def read_launches(run_dir: Path) -> list[Launch]:
    """Starts of a run, oldest first; none before its first one."""
    path = run_dir / FILE
    return read_json(path, list[Launch]) if path.exists() else []


def _text(path: str) -> str:
    """Text of a path or of words that hold some; bytes that are no UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")


def command_line(arguments: Sequence[str]) -> str:
    """The command as one types it, without credentials in addresses."""
    program, *others = arguments
    name = Path(program).name
    name = "tailrace" if name in ("tailrace", "__main__.py") else name
    return shlex.join(
        [name, *(without_credentials(each) if "://" in each else each for each in others)]
    )


def commit_of(folder: Path) -> str:
    """Commit of the repository around a folder, and whether files were changed; empty: none."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return ""
    changes = _git(folder, "status", "--porcelain")
    if changes is None:
        return f"{commit}, perhaps with changes"
    return f"{commit}, with changes" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one that is too slow
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
