"""Reward functions in the process of a command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace_cli.terminal.play import InProcessFunction
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_reward.ports import ComponentFailedError

ITEM = ScoreItem("e", EnvTask("tag", 0, 0), (), (), {})
may_end = threading.Event()


def half(*_: Any) -> float:
    return 0.5


def broken(*_: Any) -> float:
    raise ValueError("no such row")


def endless(*_: Any) -> float:
    may_end.wait()
    return 1.0


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    may_end.clear()
    yield
    may_end.set()


def function(name: str, timeout_s: float = 60.0) -> InProcessFunction:
    return InProcessFunction(f"{__name__}:{name}", timeout_s, {})


async def test_a_function_s_number_is_the_score_and_its_error_is_told() -> None:
    assert await function("half").score(ITEM) == 0.5
    with pytest.raises(ComponentFailedError, match=r"broken raised ValueError: no such row$"):
        await function("broken").score(ITEM)


async def test_a_function_that_never_returns_does_not_keep_the_command_from_ending() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ComponentFailedError, match=r"took longer than 0\.01 s"):
        await function("endless", 0.01).score(ITEM)
    assert [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon] == []
