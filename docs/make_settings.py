"""Writes `settings.md`: settings by the names of this field, and those of other systems, in ours.

`python docs/make_settings.py` writes it from the tables, `--check` only says whether it is as they say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tailrace.config.settings import TABLES, Refused, Renamed, Rule, ValueNames
from tailrace_cli.commands.import_config import SYSTEMS
from tailrace_cli.importing.rules import System

PAGE = Path(__file__).with_name("settings.md")
INTRODUCTION = """# Settings by other names

Made from the tables in the code by `make docs`.

An experiment has the run's own keys at the top and one section per service; every key is explained
where it is read, in the `config.py` of its service (`shared/tailrace/config/run.py` for those at
the top), and `tailrace validate FILE` prints all of them as they are resolved. Many settings have a
name that people of this field know from other systems: those of the first part may be used in an
experiment as they are. Each means the one key beside it. Both together are an error that names
both; null is the same as not given; a name below a section that is not listed is an error too.

```yaml
adv_estimator: grpo
pg_clip: 0.2
actor_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 8, gradient_accumulation_steps: 4}
  device_mapping: list(range(0, 2))
agents: {max_episode_tokens: 2048}
actor_infer:
  generating_args: {temperature: 0.9, max_new_tokens: 1024}
  device_mapping: [2, 3]
train_env_manager: {tags: [lake], num_env_groups: 32, group_size: 8}
```

Whole configurations of ROLL, verl and AReaL are translated by a command. It reads a YAML file, a
trainer's overrides (lines `key=value`, or a YAML list of them), or a shell script that calls a trainer
with overrides; variables are followed where the script assigns a literal to them. It writes our keys to
standard output (`-o FILE`: to a file), and to standard error a line for every setting that it could
not map, for what is missing or not valid then, and for settings that change nothing in their own system
either. What the source leaves to its system's defaults is written too where ours are others; a comment
at the top names these keys, and a line says which of the defaults could not be mapped. With `--strict`
the exit code is 2 if anything of the source is not mapped, missing or not valid.

```bash
tailrace import-config verl my_verl_run.yaml -o experiment.yaml
tailrace import-config verl run_qwen.sh -o experiment.yaml
tailrace validate experiment.yaml
```
"""
IMPORTED = """## Settings of other systems

What `tailrace import-config` maps. `*` stands for any name.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    for part, settings in TABLES.items():
        title = part if " " in part else f"`{part}`"
        yield from _table(f"## {title}", "name", settings)
    yield IMPORTED
    for system in SYSTEMS.values():
        yield from _table(f"### {system.title}", f"in {system.title}", system.rules)
        yield from _defaults(system)


def _table(title: str, column: str, settings: Iterable[Rule]) -> Iterator[str]:
    yield f"{title}\n"
    yield f"| {column} | here | remark |"
    yield "|---|---|---|"
    seen: set[str] = set()
    for setting in settings:
        if setting.name not in seen:
            seen.add(setting.name)
            yield f"| `{setting.name}` | {_ours(setting)} | {_remark(setting)} |"
    yield ""


def _defaults(system: System) -> Iterator[str]:
    yield f"Where the source says nothing, with the defaults of {system.title}:\n"
    yield "| setting | value |"
    yield "|---|---|"
    for default in system.defaults:
        yield f"| `{default.name}` | `{_yaml(default.value)}` |"
    for key, value in system.always.items():
        yield f"| here `{key}` | `{_yaml(value)}` |"
    yield ""


def _ours(setting: Rule) -> str:
    if isinstance(setting, Refused):
        return "-"
    return ", ".join(f"`{key}`" for key in setting.sets) or "-"


def _remark(setting: Rule) -> str:
    """Its remark, and the values that have another name here."""
    convert = setting.convert if isinstance(setting, Renamed) else None
    others = convert.ours.items() if isinstance(convert, ValueNames) else ()
    values = [f"`{name}` is `{_yaml(value)}`" for name, value in others if name != value]
    return "; ".join(filter(None, [setting.remark, *values]))


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> int:
    """Write the page, or say whether it is up to date."""
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
