"""Examples and tables of docs/environments.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tailrace.config import ConfigError
from tailrace.config.settings import TABLES
from tailrace_agents.config import EnvEntry
from tailrace_cli.experiment import Experiment, load
from tailrace_cli.validation import check_experiment
from tailrace_envs import ENV_TYPES, env_config_kind, make_env

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = {
    language: re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    for language in ("python", "yaml", "bash")
}


def test_an_environment_of_ones_own_takes_twenty_lines_and_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = BLOCKS["python"]
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 20
    (tmp_path / "guess.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    entry = yaml.safe_load(BLOCKS["yaml"][1])["agents"]["custom_envs"]["guess"]
    env = make_env(entry["env_type"], entry["env_config"])
    assert env.reset(seed=3)[0] == "Guess my number, 1 to 20."
    heard = {env.step(str(number))[0] for number in (0, 21)}
    assert heard == {"Too low.", "Too high."}
    endings = [env.step(str(number)) for number in range(1, 21)]
    assert sum(ending[1] for ending in endings) == 1.0
    assert [ending[2] for ending in endings] == [ending[4]["success"] for ending in endings]


def test_every_type_and_every_key_on_the_page_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    kinds = {kind: keys for kind, keys in rows if kind in ENV_TYPES}
    assert kinds.keys() == ENV_TYPES.keys()
    for kind, keys in kinds.items():
        assert set(re.findall(r"`(\w+)`", keys)) == keys_of(kind), kind


def keys_of(env_type: str) -> set[str]:
    kind = env_config_kind(env_type)
    assert kind is not None
    return set(kind.__struct_fields__)


def test_the_table_of_groups_and_workers_is_that_of_the_code() -> None:
    part = PAGE.partition("## Groups and workers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| `([\w.]+)` \|$", part, re.MULTILINE)
    said = {
        f"{manager}.{key}": (ours,)
        for key, *columns in rows
        for manager, ours in zip(("train_env_manager", "val_env_manager"), columns, strict=True)
    }
    settings = (*TABLES["train_env_manager"], *TABLES["val_env_manager"])
    assert said == {setting.name: setting.sets for setting in settings}


def test_the_examples_of_rows_are_valid_and_a_window_alone_is_not() -> None:
    def resolved(*overrides: str) -> Experiment:
        experiment = load(ROOT / "examples" / "frozen_lake" / "experiment.yaml", overrides)
        check_experiment(experiment)
        return experiment

    commands = [line.split() for block in BLOCKS["bash"] for line in block.splitlines()]
    assert [command[:3] for command in commands] == [
        ["tailrace", "validate", "examples/frozen_lake"]
    ] * 2
    turns, window = (resolved(*command[3:]) for command in commands)
    assert turns.run.granularity == window.run.granularity == "step"
    seen = [made.agents.custom_envs["frozen_lake"].history_turns for made in (turns, window)]
    assert seen == [None, 2]
    with pytest.raises(ConfigError, match="history_turns needs granularity: step"):
        resolved(commands[1][-1])


def test_the_entries_on_the_page_are_valid() -> None:
    entries = yaml.safe_load(BLOCKS["yaml"][0])["agents"]["custom_envs"]
    entries |= yaml.safe_load(BLOCKS["yaml"][3])
    assert len(entries) == 5
    for entry in entries.values():
        assert EnvEntry(**entry).env_type in ENV_TYPES
    make_env(entries["crates"]["env_type"], entries["crates"]["env_config"])
    make_env(entries["taxi"]["env_type"], entries["taxi"]["env_config"])
