"""Experiment files: strict decoding of a resolved YAML into frozen Structs, with helpful errors.

An experiment file has the run's own keys at the top (`RunConfig`) and one section per service. A
service decodes `RunConfig` and its own section and never looks at the others. Unknown keys are
errors that name the key, the file and the closest valid key.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from tailrace_protos.subjects import check_run_name

SECTIONS = ("scheduler", "agents", "inference", "reward", "learner", "weight_sync", "cluster")


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key, the file and the remedy."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration Struct. `frozen` and `forbid_unknown_fields` are inherited."""


class RunConfig(Config, frozen=True, kw_only=True):
    """The keys at the top of an experiment file: what more than one service must agree on."""

    exp_name: str
    """Name of the run: its folder under `output_dir` and the prefix of its subjects and keys."""

    seed: int = 0
    """Fixes data order, initial weights and sampling seeds."""

    output_dir: str = "runs"
    """Where run directories are made: `<output_dir>/<exp_name>/`."""

    max_steps: int = 100
    """Optimizer steps until the run ends; 0 only evaluates."""

    save_steps: int = 50
    """A checkpoint every so many steps, and always one at the end."""

    eval_steps: int = 25
    """An evaluation every so many steps, besides those before the first and after the last step;
    0 means only these two."""

    logging_steps: int = 1
    """A progress line in the learner's log every so many steps."""

    pretrain: str = ""
    """Directory (or hub name) of a Hugging Face causal LM to start from. Empty: random weights from
    `learner.from_scratch`."""

    resume_from_checkpoint: bool | str = False
    """true: continue from the newest checkpoint of this run; a path: from that checkpoint."""

    render_save_dir: str = ""
    """Where rendered episodes of the last evaluation go; empty: `renders/` in the run directory."""

    group_size: int = 8
    """Episodes of one task whose returns are compared with each other."""

    groups_per_step: int = 32
    """Groups that make one optimizer step."""

    max_staleness: int = 2
    """Optimizer steps that a trained token's policy may lie behind the learner. 0: synchronous."""

    def __post_init__(self) -> None:
        check_run_name(self.exp_name)
        for key in ("group_size", "groups_per_step"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("max_steps", "save_steps", "eval_steps", "max_staleness"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute."""
        return Path(self.output_dir).absolute() / self.exp_name


class Endpoints(Config, frozen=True, kw_only=True):
    """Where the servers are and who we are to them; comes from the environment, never from YAML."""

    nats_url: str
    nats_user: str = ""
    nats_password: str = ""
    redis_url: str
    host_id: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Endpoints:
        """Read `TAILRACE_NATS_URL`, `_NATS_USER`, `_NATS_PASSWORD`, `_REDIS_URL`, `_HOST_ID`."""
        missing = [key for key in ("TAILRACE_NATS_URL", "TAILRACE_REDIS_URL") if key not in env]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: services are started by `tailrace up` or "
                "`tailrace train`, or by the chart, which set them"
            )
        return cls(
            nats_url=env["TAILRACE_NATS_URL"],
            nats_user=env.get("TAILRACE_NATS_USER", ""),
            nats_password=env.get("TAILRACE_NATS_PASSWORD", ""),
            redis_url=env["TAILRACE_REDIS_URL"],
            host_id=env.get("TAILRACE_HOST_ID", "") or this_host_id(),
        )


def this_host_id() -> str:
    """Equal for two processes only if they can share memory: host name and boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip()[:8] if boot_id.exists() else "noboot"
    return f"{socket.gethostname()}-{boot}"


C = TypeVar("C", bound=Config)


def load_experiment(path: str | Path) -> dict[str, Any]:
    """The mapping in a resolved experiment file; raises `ConfigError` when it cannot be read."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read experiment file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys at the top level, found {type(content).__name__}")
    return content


def run_config(experiment: Mapping[str, Any], source: str) -> RunConfig:
    """Decode the top-level keys; sections are left to their services, other names are errors."""
    top = {key: value for key, value in experiment.items() if key not in SECTIONS}
    return decode_config(top, RunConfig, source, also_valid=SECTIONS)


def section_config(experiment: Mapping[str, Any], section: str, kind: type[C], source: str) -> C:
    """Decode one service's section (missing: all defaults)."""
    return decode_config(experiment.get(section) or {}, kind, source, where=section)


def decode_config(
    content: object, kind: type[C], source: str, *, where: str = "", also_valid: tuple[str, ...] = ()
) -> C:
    """Strictly decode `content`; `ConfigError` names the key, `source` and the closest valid key."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), kind, where, also_valid)}") from error


_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_AT = re.compile(r"^(.*?)(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


def _explain(reason: str, kind: type[Config], where: str, also_valid: tuple[str, ...]) -> str:
    """Rewrite msgspec's words as key, problem, remedy."""
    unknown = _UNKNOWN.match(reason)
    if unknown:
        key, parent = unknown.group(1), unknown.group(2) or ""
        valid = [*_fields_at(kind, parent), *(also_valid if not parent else ())]
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
        return f"unknown key {_join(where, parent, key)!r}; {remedy}"
    matched = _AT.match(reason)
    assert matched is not None
    place = _join(where, matched.group(2) or "")
    return f"{place + ': ' if place else ''}{matched.group(1)}"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _fields_at(kind: type[Config], path: str) -> list[str]:
    """Names of the fields of the Struct that `path` (dotted, below `kind`) leads to."""
    info: Any = msgspec.inspect.type_info(kind)
    for step in filter(None, path.split(".")):
        info = _descend(info, step)
    fields = getattr(info, "fields", ())
    return [field.encode_name for field in fields]


def _descend(info: Any, step: str) -> Any:
    name = step.split("[")[0]
    for field in getattr(info, "fields", ()):
        if field.encode_name == name:
            return _struct_inside(field.type)
    return _struct_inside(getattr(info, "value_type", None) or info)


def _struct_inside(info: Any) -> Any:
    """The Struct within optional, list and dict types, or `info` itself."""
    for inner in (*getattr(info, "types", ()), getattr(info, "item_type", None)):
        if inner is not None and hasattr(_struct_inside(inner), "fields"):
            return _struct_inside(inner)
    value_type = getattr(info, "value_type", None)
    return _struct_inside(value_type) if value_type is not None else info
