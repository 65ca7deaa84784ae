"""The page about environments keeps its promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tailrace.envs import ENV_TYPES, env_maker, make_env
from tailrace_agents.config import EnvEntry

PAGE = (Path(__file__).parents[4] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = {
    language: re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    for language in ("python", "yaml")
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
        if kind in ("verifiers", "openenv"):
            continue  # their packages may be missing here
        module = sys.modules[env_maker(kind).__module__]
        config = next(
            value
            for name, value in vars(module).items()
            if name.endswith("Config") and name != "Config"
        )
        assert set(re.findall(r"`(\w+)`", keys)) <= set(config.__struct_fields__)


def test_the_entries_on_the_page_are_valid() -> None:
    entries = yaml.safe_load(BLOCKS["yaml"][0])["agents"]["custom_envs"]
    entries |= yaml.safe_load(BLOCKS["yaml"][3])
    assert len(entries) == 4
    for entry in entries.values():
        assert EnvEntry(**entry).env_type in ENV_TYPES
    make_env(entries["crates"]["env_type"], entries["crates"]["env_config"])
    make_env(entries["taxi"]["env_type"], entries["taxi"]["env_config"])
