"""Environments of the real gymnasium, as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tailrace_envs import make_env
from tailrace_envs.published.gymnasium_env import INVALID_NOTE
from tailrace_envs.published.spaces_text import action_reader, observation_text

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["Left", "Down", "Right", "Up"],
}
CART = {"id": "CartPole-v1", "kwargs": {}, "actions": []}
WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


def test_an_environment_that_renders_as_text_is_read_as_text_without_colours() -> None:
    env = make_env("gymnasium", LAKE)
    assert env.reset(seed=0)[0] == "\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    observation, *_ = env.step("I go down.")
    assert observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert env.render() == observation


def test_its_rewards_and_endings_are_the_environments_own() -> None:
    env = make_env("gymnasium", LAKE)
    env.reset(seed=0)
    *_, (_, reward, terminated, truncated, info) = [env.step(word) for word in WAY]
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, 1.0)


def test_its_own_limit_of_steps_truncates() -> None:
    config = {**LAKE, "kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    env = make_env("gymnasium", config)
    env.reset(seed=0)
    env.step("Left")
    _, _, terminated, truncated, info = env.step("Left")
    assert (terminated, truncated, info["success"]) == (False, True, 0.0)


def test_an_end_at_its_own_limit_of_steps_is_an_end_too() -> None:
    kwargs = {"is_slippery": False, "max_episode_steps": len(WAY)}
    env = make_env("gymnasium", {**LAKE, "kwargs": kwargs})
    real = gymnasium.make("FrozenLake-v1", **kwargs)
    env.reset(seed=0)
    real.reset(seed=0)
    for word in WAY:
        ours, theirs = env.step(word), real.step(LAKE["actions"].index(word))
    assert ours[2:4] == theirs[2:4] == (True, True)


def test_our_limit_of_turns_truncates() -> None:
    env = make_env("gymnasium", {**LAKE, "max_turns": 1})
    env.reset(seed=0)
    assert env.step("Left")[2:4] == (False, True)


def test_a_reply_without_an_action_moves_nothing_and_costs_the_penalty() -> None:
    env = make_env("gymnasium", {**LAKE, "invalid_action_penalty": 0.5})
    shown, _ = env.reset(seed=0)
    observation, reward, *_, info = env.step("Leftwards")
    assert (observation, reward, info["invalid_action"]) == (INVALID_NOTE + shown, -0.5, True)


def test_observations_are_read_as_numbers_where_there_is_no_text() -> None:
    env = make_env("gymnasium", {"id": "CartPole-v1", "success_return": 3.0, "max_turns": 3})
    observation, _ = env.reset(seed=1)
    real, _ = gymnasium.make("CartPole-v1").reset(seed=1)
    assert np.fromstring(observation.strip("[]\n"), sep=",") == pytest.approx(real, abs=1e-3)
    *_, (_, _, _, truncated, info) = [env.step("1"), env.step("0"), env.step("1")]
    assert (truncated, info["success"]) == (True, 1.0)


def test_the_seed_fixes_the_episode() -> None:
    first, second = (make_env("gymnasium", {"id": "Blackjack-v1"}) for _ in range(2))
    for seed in range(8):
        assert first.reset(seed=seed)[0] == second.reset(seed=seed)[0]
        assert first.step("1")[:4] == second.step("1")[:4]


def test_text_before_the_first_observation_is_a_key() -> None:
    shown, _ = make_env("gymnasium", LAKE).reset(seed=0)
    assert make_env("gymnasium", {**LAKE, "instructions": "Go!"}).reset(seed=0)[0] == f"Go!{shown}"


MODULE = """
import gymnasium
import numpy


class Modest(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 1, -1.0, True, False, {"is_success": numpy.float32(1)}


gymnasium.register("Modest-v0", Modest)
"""


def test_what_an_environment_of_another_module_says_of_success_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modest_games.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for config, success in (({}, 1.0), ({"success_return": 0.0}, 0.0)):
        env = make_env("gymnasium", {"id": "modest_games:Modest-v0", **config})
        assert env.reset(seed=0)[0] == "0\n"
        assert env.render() == "0\n"
        assert env.step("1")[4]["success"] == success


def test_a_picture_is_drawn_where_the_environment_draws_one() -> None:
    env = make_env("gymnasium", {**LAKE, "observation": "space"})
    assert env.reset(seed=0)[0] == "0\n"
    assert env.render().shape == (256, 256, 3)


def test_functions_of_the_user_translate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "translation", sys.modules[__name__])
    config = {**LAKE, "to_text": "translation:cell", "to_action": "translation:first_letter"}
    env = make_env("gymnasium", {**config, "actions": []})
    assert env.reset(seed=0)[0] == "cell 0"
    assert env.step("d")[0] == "cell 4"
    assert env.step("x")[0] == INVALID_NOTE + "cell 4"


def cell(observation: int) -> str:
    return f"cell {observation}"


def first_letter(reply: str) -> int | None:
    found = "ldru".find(reply[0])
    return found if found >= 0 else None


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (spaces.Discrete(3), "action 2", 2),
        (spaces.Discrete(3), "12", None),
        (spaces.Discrete(3, start=5), "6", 6),
        (spaces.Discrete(3), "-1", None),
        (spaces.Discrete(3), "\N{MINUS SIGN}1", None),
        (spaces.Discrete(3), "1.5", None),
        (spaces.Discrete(3), ".2", None),
        (spaces.Discrete(3), "1e2", None),
        (spaces.Discrete(3), "I take 1.", 1),
        (spaces.Discrete(3), "action:2, not 1", 2),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(3, start=-1), "1", 1),
        (spaces.Discrete(3, start=-1), "\N{MINUS SIGN}1", -1),
        (spaces.Text(5), "hello", "hello"),
        (spaces.Text(5), "too long", None),
        (spaces.Box(-1.0, 1.0, (2,)), "0.5 and -7", [0.5, -1.0]),
        (spaces.Box(-1.0, 1.0, (2,)), "0.5", None),
        (spaces.Box(-9.0, 9.0, (2,)), ".5 and -.25", [0.5, -0.25]),
        (spaces.Box(-9.0, 9.0, (2,)), "+2, 3.", [2.0, 3.0]),
        (spaces.Box(-9.0, 9.0, (1,)), "5e-1", [0.5]),
        (spaces.Box(-9999.0, 9999.0, (1,)), "1E3", [1000.0]),
        (spaces.Box(-9.0, 9.0, (1,)), "\N{MINUS SIGN}2", [-2.0]),
        (spaces.Box(-9.0, 9.0, (1,)), "1_0", None),
        (spaces.Box(-9.0, 9.0, (1,)), "5m", None),
        (spaces.Box(-9.0, 9.0, (1,)), "version 1.2.3", None),
        (spaces.Box(-9.0, 9.0, (2,)), "x1=0.5, x2=0.25", [0.5, 0.25]),
        (spaces.Box(-9.0, 9.0, (1,)), "1e999", [9.0]),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e39", None),  # no float32
        (spaces.Box(-np.inf, np.inf, (1,)), "1e999", None),
        (spaces.Box(0, 255, (1,), np.uint8), "300", [255]),
        (spaces.Box(0, 255, (1,), np.uint8), "1.5", None),
        (spaces.MultiDiscrete([2, 3]), "1.5, 2", None),
        (spaces.MultiBinary(2), "257 1", None),  # not 1, which eight bits make of it
        (spaces.MultiBinary(2), "-1 1", None),
        (spaces.MultiDiscrete([2, 3]), "1, 2", [1, 2]),
        (spaces.MultiDiscrete([2, 3]), "1, 3", None),
        (spaces.MultiBinary(2), "1 0", [1, 0]),
    ],
)
def test_replies_become_actions_of_the_space(space: Any, reply: str, action: Any) -> None:
    read = action_reader(space, ())(reply)
    if action is None:
        assert read is None
    else:
        assert space.contains(read)
        assert np.asarray(read).tolist() == action


def test_observations_of_every_space_become_text() -> None:
    space = spaces.Dict(
        a=spaces.Tuple([spaces.Discrete(9), spaces.Text(9)]), b=spaces.Box(-9.0, 9.0, (2,))
    )
    observation = {"a": (4, "four"), "b": np.array([0.12345, -1.0])}
    assert observation_text(space, observation) == "a: 4\nfour\nb: [ 0.123, -1.   ]"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": "Nowhere-v0"}, "Nowhere"),
        ({"kwargs": {"is_sliper": 1}}, "is_sliper"),
        ({"actions": ["Left", "Right"]}, "actions must name all 4"),
        ({"actions": ["A", "a", "b", "c"]}, "each by a distinct word"),
        ({**CART, "observation": "ansi"}, "does not render as ansi"),
        ({"id": "MountainCarContinuous-v0", "kwargs": {}}, "actions: names are for discrete"),
        ({"to_action": "a:b"}, "actions and to_action"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turn": 3}, "did you mean 'max_turns'"),
        ({"to_text": "no_such_module:f", "actions": []}, "to_text: cannot import"),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_remedy(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_env("gymnasium", {**LAKE, **change})
