"""Environments of users by `env_type: module:Class`."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace.policy.activity import Stages
from tailrace_agents.adapters.player_factory import make_pools
from tailrace_agents.config import AgentsConfig, EnvEntry
from tailrace_envs import ENV_TYPES, UnknownEnvTypeError, env_maker, make_env


class Parrot:
    """Environment that expects one word."""

    def __init__(self, word: str = "hello") -> None:
        if not word:
            raise ValueError("word must not be empty")
        self.word = word

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"Say {self.word} {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self.word in action), True, False, {"success": self.word in action}

    def render(self) -> None:
        return None

    def close(self) -> None:
        """Frees nothing."""


class Mute:
    """Class that is not an environment."""

    def reset(self) -> None:
        """Resets; other methods are missing."""


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_envs", sys.modules[__name__])


def pools(env_type: str, **env_config: Any) -> Any:
    config = AgentsConfig(custom_envs={"mine": EnvEntry(env_type=env_type, env_config=env_config)})
    with ThreadPoolExecutor(1) as threads:
        return make_pools(config, "run.yaml", threads, Stages())


async def test_a_class_of_the_user_is_made_with_its_keys_and_played() -> None:
    env = make_env("own_envs:Parrot", {"word": "hi"})
    assert env.reset(seed=4)[0] == "Say hi 4."
    assert env.step("hi!")[1] == 1.0
    handle = pools("own_envs:Parrot", word="hi")["mine"].take()
    assert (await handle.reset(3)).observation == "Say hi 3."
    assert (await handle.step("no")).numbers == {"success": 0.0}


class Slow(Parrot):
    """Environment that reports the thread of each call."""

    waits = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return threading.current_thread().name, {}


class Quick(Slow):
    waits = False


@pytest.mark.parametrize(
    ("env_type", "in_threads", "thread"),
    [("Slow", None, "env"), ("Quick", None, "Main"), ("Slow", False, "Main"), ("Quick", True, "env")],
)
async def test_environments_that_wait_run_in_threads_unless_the_entry_says_otherwise(
    env_type: str, in_threads: bool | None, thread: str
) -> None:
    entry = EnvEntry(env_type=f"own_envs:{env_type}", in_threads=in_threads)
    with ThreadPoolExecutor(1, "env") as threads:
        made = make_pools(AgentsConfig(custom_envs={"mine": entry}), "f", threads, Stages())
        assert (await made["mine"].take().reset(1)).observation.startswith(thread)


@pytest.mark.parametrize(
    ("env_type", "env_config", "named"),
    [
        ("own_envs:Parrot", {"word": ""}, "agents.custom_envs.mine: word must not be empty"),
        ("own_envs:Parrot", {"words": "a"}, "agents.custom_envs.mine: making .* TypeError: .*'words'"),
        ("own_envs:Mute", {}, "agents.custom_envs.mine: env_type: .* has no step and no close"),
        ("own_envs:Nobody", {}, "agents.custom_envs.mine: env_type: module 'own_envs' has no 'Nobody'"),
        ("no_such_module:Env", {}, "agents.custom_envs.mine: env_type: cannot import 'no_such_module'"),
        ("frozenlake", {}, "agents.custom_envs.mine: unknown env_type 'frozenlake'; did you mean"),
    ],
)
def test_what_cannot_be_made_is_an_error_at_the_start_that_names_the_entry(
    env_type: str, env_config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"run.yaml: {named}"):
        pools(env_type, **env_config)


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownEnvTypeError, match=r"frozen_lake, .*webshop, or module:Class"):
        make_env("chess", {})


@pytest.mark.parametrize("env_type", sorted(set(ENV_TYPES) - {"verifiers", "openenv"}))
def test_every_type_names_a_class_that_is_there(env_type: str) -> None:
    assert env_maker(env_type).__doc__


@pytest.mark.parametrize("extra", ["verifiers", "openenv"])
def test_a_package_that_is_missing_is_named_with_the_remedy(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = {"verifiers": "verifiers", "openenv": "openenv.core"}[extra]
    module = ENV_TYPES[extra].maker.partition(":")[0]
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, vendor, None)
    with pytest.raises(ConfigError, match=rf"pip install 'tailrace\[{extra}\]'"):
        make_env(extra, {})
