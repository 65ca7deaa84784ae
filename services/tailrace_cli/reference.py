"""The reference of all keys of an experiment: section, type, default, unit, meaning and readers.

Docs and `tailrace explain` show it. Everything but the readers comes from the configuration Structs.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tailrace.config import ConfigError
from tailrace.config.keys import Key, keys_of
from tailrace.config.settings import TABLES, Rule
from tailrace.config.suggestions import closest
from tailrace_cli.experiment import SECTION_KINDS
from tailrace_envs import ENV_TYPES, env_config_kind
from tailrace_protos.subjects import SERVICES

_ALL = (*SERVICES, "cli")
READERS_OF_RUN: dict[str, tuple[str, ...]] = {
    "exp_name": _ALL,
    "seed": ("scheduler", "agents", "learner", "cli"),
    "output_dir": ("scheduler", "agents", "inference", "learner", "weight_sync", "cli"),
    "max_steps": ("scheduler", "learner", "cli"),
    "num_epochs": ("cli",),
    "evaluations": ("scheduler", "agents", "cli"),
    "save_steps": ("learner",),
    "eval_steps": ("scheduler",),
    "logging_steps": ("learner",),
    "pretrain": ("gateway", "learner", "cli"),
    "resume_from_checkpoint": ("scheduler", "learner", "cli"),
    "render_save_dir": ("agents", "cli"),
    "logging_dir": ("cli",),
    "group_size": ("scheduler",),
    "groups_per_step": ("scheduler", "learner", "cli"),
    "granularity": ("agents", "gateway", "cli"),
    "max_staleness": ("scheduler", "learner"),
    "stale_groups": ("scheduler", "learner"),
    "colocated": ("learner", "inference", "cli"),
    "chat": ("agents", "gateway", "learner", "cli"),
    "tracing": _ALL,
}
"""Services that read each key at the top level; a section is read by its own service alone."""

_READERS_BELOW: dict[str, dict[str, tuple[str, ...]]] = {
    "evaluations": {
        **dict.fromkeys(("num_tasks", "num_samples"), ("scheduler",)),
        **dict.fromkeys(("temperature", "top_p", "max_new_tokens"), ("agents",)),
        "tag": ("scheduler", "cli"),
    },
    "tracing": {"mlflow_per_minute": ("agents",)},
}

_READER_OF_SECTION = {"cluster": ("cli",)}


class Entry(NamedTuple):
    """A key of an experiment, as the reference lists it."""

    key: Key
    part: str  # heading of the reference
    readers: tuple[str, ...]  # services

    @property
    def name(self) -> str:
        """Dotted name, in which `*` stands for any name."""
        return self.key.name


@cache
def entries() -> tuple[Entry, ...]:
    """Returns every key: those of the run, of all sections, and of the environments' `env_config`."""
    return (*_sections(), *_environments())


def find(name: str) -> list[Entry]:
    """Returns the entries for a key, and those below it if it is a section.

    Raises `ConfigError` with the closest names for one that is unknown.
    """
    steps = name.split(".")
    found = [entry for entry in entries() if _begins_with(entry.name.split("."), steps)]
    if not found:
        raise ConfigError(f"unknown key {name!r}; {_remedy(name)}")
    return found


def is_key(name: str) -> bool:
    """Tells whether an experiment has this key or section."""
    return any(_begins_with(entry.name.split("."), name.split(".")) for entry in entries())


def rule_named(name: str) -> Rule | None:
    """Returns the rule of our tables for another name of a key."""
    return next((rule for table in TABLES.values() for rule in table if rule.name == name), None)


def other_names(key: str) -> list[str]:
    """Returns the names of our tables that set a key."""
    return [rule.name for table in TABLES.values() for rule in table if key in rule.sets]


def _sections() -> Iterator[Entry]:
    for section, kind in SECTION_KINDS.items():
        in_run = section == "run"
        part = "At the top level" if in_run else f"`{section}`"
        for key in keys_of(kind, "" if in_run else section):
            top = key.name.partition(".")[0]
            readers = READERS_OF_RUN[top] if in_run else _READER_OF_SECTION.get(section, (section,))
            readers = _READERS_BELOW.get(top, {}).get(key.name.rpartition(".")[2], readers)
            yield Entry(key, part, readers)


def _environments() -> Iterator[Entry]:
    for env_type in ENV_TYPES:
        kind = env_config_kind(env_type)
        assert kind is not None
        for key in keys_of(kind, "agents.custom_envs.*.env_config"):
            yield Entry(key, f"`env_config` with `env_type: {env_type}`", ("agents", "cli"))


def _begins_with(steps: list[str], given: list[str]) -> bool:
    pairs = zip(steps, given, strict=False)
    return len(steps) >= len(given) and all(step in ("*", wanted) for step, wanted in pairs)


def _remedy(name: str) -> str:
    names = {entry.name for entry in entries()}
    names |= {rule.name for table in TABLES.values() for rule in table}
    last = name.rpartition(".")[2]
    end = closest(last, {each.rpartition(".")[2] for each in names})
    near = [each for each in sorted(names) if end and each.rpartition(".")[2] == end]
    if end != last and (found := closest(name, names)):
        near = [found, *near]
    if not near:
        return "docs/reference.md lists all keys"
    return f"did you mean {' or '.join(dict.fromkeys(near[:4]))}?"
