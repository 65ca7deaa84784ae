"""The border to users' code: their exceptions are typed, their mistakes show early."""

from __future__ import annotations

import asyncio

import gymnasium
import pytest

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk import Env, reward
from tailrace_envs import make_env


def test_what_foreign_code_raises_keeps_its_type_and_place() -> None:
    with (
        pytest.raises(ForeignCodeError, match=r"env\.step raised KeyError: 'x'") as caught,
        foreign_code("env.step"),
    ):
        raise KeyError("x")
    assert isinstance(caught.value.error, KeyError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.where == "env.step"


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_cancellation_and_exits_pass_the_border(error: type[BaseException]) -> None:
    with pytest.raises(error), foreign_code("env.step"):
        raise error


def test_a_gymnasium_environment_is_an_env() -> None:
    env: Env = make_env("frozen_lake", {"size": 3})
    assert isinstance(env, gymnasium.Env)
    observation, _ = env.reset(seed=1)
    assert isinstance(observation, str)


def test_a_reward_is_the_function_itself() -> None:
    assert reward(test_a_gymnasium_environment_is_an_env) is test_a_gymnasium_environment_is_an_env


def test_what_no_service_could_call_is_refused_where_it_is_written() -> None:
    def inner(task: object, messages: object, metrics: object) -> float:
        return 0.0

    with pytest.raises(TypeError, match="at the top of a module"):
        reward(inner)
    with pytest.raises(TypeError, match="expects a function, found int"):
        reward(3)  # type: ignore[type-var]
