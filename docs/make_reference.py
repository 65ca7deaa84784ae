"""Writes `reference.md`: every key of an experiment, its other names, and those of other systems.

`python docs/make_reference.py` writes it; `--check` exits with 1 if it differs from the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from tailrace.config.settings import TABLES, Refused, Renamed, Rule, ValueNames
from tailrace_cli.importing.rules import System
from tailrace_cli.importing.systems import SYSTEMS
from tailrace_cli.reference import Entry, entries

PAGE = Path(__file__).with_name("reference.md")
INTRODUCTION = """# Reference of all keys

`make docs` writes this page from the code. `tailrace explain KEY` prints the same for one key or section.

An experiment file has the keys of the run at the top level and one section for each service. Every
service reads the keys of the run that it needs and its own section. Unknown keys are errors that name the
closest key. `tailrace validate --print FILE` prints an experiment with all defaults. In the names below, `*`
stands for any name or list item.
"""
OTHER_NAMES = """## Other names of keys

Many keys have a name that other systems use too. An experiment may use these names: each sets the keys
beside it. Giving both names of a key is an error. null means that a key is not given. Below a role, only
the names of its table are possible.

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
"""
IMPORTED = """## Configurations of other systems

`tailrace import-config` converts a whole configuration of ROLL, verl or AReaL:

```bash
tailrace import-config verl my_verl_run.yaml -o experiment.yaml
tailrace import-config verl my_verl_run.yaml trainer.total_training_steps=100 -o experiment.yaml
tailrace import-config verl -o experiment.yaml -- python3 -m verl.trainer.main_ppo data.train_batch_size=64
tailrace validate experiment.yaml
```

It reads a YAML file, and composes the `defaults:` of the file if they are in their place. It also reads
lists of `key=value`: one on each line, or a YAML list. Shell scripts are not read, because only a shell
knows the values of variables. In a copy of the script, put `tailrace import-config verl --` in place of
`python3 -m verl.trainer.main_ppo` and run the copy: the command gets the words that the trainer would
get. Or put `printf '%s\\n'` there, save the printed list, and import that file.

The experiment goes to standard output, or with `-o` to a file. Standard error gets a line for every
setting that is not mapped, missing or not valid, and for settings that mean something else here. Harmless
settings are counted; `--all` lists them. The last line says whether the experiment runs, or what it
needs. Where the defaults of the system differ from ours, the experiment has them, and a comment at its top
names these keys. The exit code is 2 if a value is not valid, and with `--strict` if anything is left. A file
that exists is replaced only by `--overwrite`, or after a question at a terminal.

In the tables `*` stands for any name.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    for part, listed in groupby(entries(), key=lambda entry: entry.part):
        yield from _keys(part, list(listed))
    yield OTHER_NAMES
    for part, rules in TABLES.items():
        title = part if " " in part else f"`{part}`"
        yield from _table(f"### {title}", "name", rules)
    yield IMPORTED
    for system in SYSTEMS.values():
        yield from _table(f"### {system.title}", f"in {system.title}", system.rules)
        yield from _defaults(system)


def _keys(part: str, listed: list[Entry]) -> Iterator[str]:
    readers = {entry.readers for entry in listed}
    yield f"## {part}\n"
    if len(readers) == 1:
        yield f"Read by: {', '.join(readers.pop())}.\n"
        yield "| key | type | default | unit | meaning |"
        yield "|---|---|---|---|---|"
    else:
        yield "| key | type | default | unit | read by | meaning |"
        yield "|---|---|---|---|---|---|"
    for key, _, services in listed:
        cells = [f"`{key.name}`", key.type, f"`{key.default}`", key.unit]
        cells += [] if len({entry.readers for entry in listed}) == 1 else [", ".join(services)]
        yield f"| {' | '.join([*cells, key.meaning.replace('|', chr(92) + '|')])} |"
    yield ""


def _table(title: str, column: str, rules: Iterable[Rule]) -> Iterator[str]:
    yield f"{title}\n"
    yield f"| {column} | here | remark |"
    yield "|---|---|---|"
    seen: set[str] = set()
    for rule in rules:
        if rule.name not in seen:
            seen.add(rule.name)
            yield f"| `{rule.name}` | {_ours(rule)} | {_remark(rule)} |"
    yield ""


def _defaults(system: System) -> Iterator[str]:
    yield f"Defaults of {system.title} for settings that the source does not give:\n"
    yield "| setting | value |"
    yield "|---|---|"
    for default in system.defaults:
        yield f"| `{default.name}` | `{_yaml(default.value)}` |"
    for key, value in system.always.items():
        yield f"| here `{key}` | `{_yaml(value)}` |"
    yield ""


def _ours(rule: Rule) -> str:
    if isinstance(rule, Refused):
        return "-"
    return ", ".join(f"`{key}`" for key in rule.sets) or "-"


def _remark(rule: Rule) -> str:
    """Returns the remark, with the values that have another name here."""
    convert = rule.convert if isinstance(rule, Renamed) else None
    others = convert.ours.items() if isinstance(convert, ValueNames) else ()
    values = [f"`{name}` is `{_yaml(value)}`" for name, value in others if name != value]
    return "; ".join(filter(None, [rule.remark, *values]))


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> int:
    """Writes the page, or checks that it is up to date."""
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
