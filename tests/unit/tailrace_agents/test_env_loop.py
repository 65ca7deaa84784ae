"""An environment's loop that begins again."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tailrace.sdk.agent_loop import EpisodeOverError
from tailrace_agents.core.env_loop import EnvLoop
from tailrace_agents.core.environments import SUCCESS, EnvHandle
from tailrace_agents.core.model import ReplayMismatchError


class Winning:
    """An environment that tells a success after every step and never ends."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return "start", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "next", 1.0, False, False, {SUCCESS: True}


class Policy:
    """A policy whose recorded step does not fit, and then one without budget."""

    def __init__(self) -> None:
        self.num_runs = 0

    async def answer(self, observation: str, opening: str) -> str:
        self.num_runs += 1
        if self.num_runs > 1:
            raise EpisodeOverError("max_turns", "none is left")
        return "go"

    async def take_step(self, step: object) -> None:
        raise ReplayMismatchError


async def test_a_success_before_a_restart_is_not_that_of_the_episode() -> None:
    env: Any = Winning()
    policy: Any = Policy()
    counts: defaultdict[str, float] = defaultdict(float)
    loop = EnvLoop(EnvHandle(env), 0, counts)
    with pytest.raises(ReplayMismatchError):
        await loop.run({}, policy)
    with pytest.raises(EpisodeOverError):
        await loop.run({}, policy)
    assert counts == {SUCCESS: 0.0}
