"""Values of a submitted run's release, from its experiment and those of the standing release (pure).

A run is a release of its own in mode `job`, with the servers of the standing release. It inherits the
standing release's values but those about servers; values files of the user win over them.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.config import ConfigError

_NOT_INHERITED = ("mode", "standing", "experiment", "servers", "nats", "redis", "credentials")
_OWNED = ("mode", "servers", "experiment")
_MAX_NAME = 34  # the chart cuts longer ones, so that names of objects stay valid
_MAX_MODULE_BYTES = 900_000  # of a ConfigMap, which holds 1 MiB
_REMOTE = re.compile(r"^[a-z0-9+]+://")


def release_name(run: str, given: str = "") -> str:
    """Name of the release of a run: `given`, or the run's name as DNS has it."""
    name = given or re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"{name!r} is no name of a release (a letter first, then a-z, 0-9 and -, at most "
            f"{_MAX_NAME}): give one with --name"
        )
    return name


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes in it, mappings merged, as Helm merges values."""
    result = copy.deepcopy(dict(base))
    for key, value in change.items():
        is_both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if is_both else copy.deepcopy(value)
    return result


def run_values(
    experiment: Mapping[str, Any],
    standing: str,
    standing_values: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    modules: Mapping[str, str],
) -> dict[str, Any]:
    """Values of the run's release; `files`: the user's, the last one wins.

    `modules`: Python files by name, sent unless the user's values say where modules come from.
    """
    values = {key: each for key, each in standing_values.items() if key not in _NOT_INHERITED}
    for file in files:
        if wrong := [key for key in _OWNED if key in file]:
            raise ConfigError(
                f"--values: {wrong[0]} is set by tailrace submit: leave it out (change keys of the "
                "experiment as key=value)"
            )
        values = merged(values, file)
    brought = values.get("userCode", {})
    if modules and not (brought.get("git", {}).get("url") or brought.get("image", {}).get("name")):
        values = merged(values, {"userCode": {"files": modules}})
    own = {"mode": "job", "servers": {"release": standing}, "experiment": dict(experiment)}
    return values | own


def check_standing(name: str, values: Mapping[str, Any], run: str) -> None:
    """Raise `ConfigError` unless the release is a standing one that lets the run use its servers."""
    if values.get("mode", "job") != "standing":
        raise ConfigError(
            f"release {name} is one run (mode job), not a standing release: name another with --release"
        )
    runs = values.get("standing", {}).get("runs") or ()
    if runs and run not in runs:
        raise ConfigError(
            f"release {name} serves the runs {', '.join(runs)} alone: helm upgrade it with {run} in "
            "standing.runs, or with an empty list for any run"
        )


def user_modules(folder: Path) -> dict[str, str]:
    """Text of the Python files beside an experiment, which pods import; `ConfigError` if too large."""
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    size = sum(len(text.encode()) for text in found.values())
    if size > _MAX_MODULE_BYTES:
        raise ConfigError(
            f"the Python files in {folder} have {size} bytes, a ConfigMap holds {_MAX_MODULE_BYTES}: "
            "put them into an image (userCode.image in --values) or a repository (userCode.git)"
        )
    return found


def check_paths(experiment: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a file or folder of this machine, which no pod has."""
    for key, name in _paths(experiment):
        if _REMOTE.match(name) or name.startswith("/"):
            continue
        if Path(os.path.expanduser(name)).exists():
            raise ConfigError(
                f"{key}: {name} is on this machine: give a path in a volume of the pods (/models/...), "
                "a name of the hub, or the URL of an object store"
            )


def _paths(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    agents, resume = experiment.get("agents") or {}, experiment.get("resume_from_checkpoint")
    found = [("pretrain", experiment.get("pretrain")), ("resume_from_checkpoint", resume)]
    for tag, data_set in (agents.get("datasets") or {}).items():
        found.append((f"agents.datasets.{tag}.path", (data_set or {}).get("path")))
    return [(key, name) for key, name in found if isinstance(name, str) and name]
