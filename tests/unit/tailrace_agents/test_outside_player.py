"""Ends of episodes that outside agents play: when their offers are closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailrace_agents.core.outside_player import OutsidePlayer
from tailrace_agents.core.workflow_player import WorkflowTerms
from tailrace_agents.ports import NoJournal
from tailrace_protos.episode import Outcome
from tailrace_protos.session import ExportStyle, OutsideOffer, OutsideResult
from tests.unit.tailrace_agents.test_workflow_player import LIMITS, World, context, task


class Desk:
    """A desk with an agent's end, or without one."""

    def __init__(self, result: OutsideResult | None, log: list[str]) -> None:
        self.result = result
        self.log = log

    async def offer(self, offer: OutsideOffer) -> bool:
        self.log.append("offer")
        return False

    async def result_of(
        self, episode_id: str, watch: Callable[[float | None], None]
    ) -> tuple[float, OutsideResult | None]:
        return 1.0, self.result

    async def give_up(self, episode_id: str, outcome: Outcome) -> OutsideResult | None:
        self.log.append("give up")
        return self.result

    async def end(self, episode_id: str, outcome: Outcome) -> None:
        self.log.append(f"end {outcome.value}")


@pytest.mark.parametrize("rewarded", [True, False])
async def test_what_an_agent_ended_is_closed_after_its_settlement_alone(rewarded: bool) -> None:
    world = World()
    desk: Any = Desk(OutsideResult(rewards={"": 0.5}) if rewarded else None, world.log)
    terms = WorkflowTerms(ExportStyle.CONCAT, 1.0, 20.0)
    player = OutsidePlayer(desk, world, context(), LIMITS, terms, 60.0, lambda _: {})
    result = await player.play(task(), NoJournal())
    closed = ["end ok" if rewarded else "end timeout", "close g7.2"]
    assert world.log == (["offer", "export"] if rewarded else ["offer", *closed])
    await result.after_settlement()
    assert world.log[-2:] == closed


class LateDesk(Desk):
    """A desk whose episode is late; the agent may have ended it since the last look."""

    started_unix_s = -1e9

    async def result_of(
        self, episode_id: str, watch: Callable[[float | None], None]
    ) -> tuple[float, OutsideResult | None]:
        watch(self.started_unix_s)
        pytest.fail("the episode is not late")


@pytest.mark.parametrize("rewarded", [True, False])
async def test_a_reward_that_was_taken_in_the_last_moment_counts(rewarded: bool) -> None:
    world = World()
    desk: Any = LateDesk(OutsideResult(rewards={"": 0.5}) if rewarded else None, world.log)
    terms = WorkflowTerms(ExportStyle.CONCAT, 1.0, 20.0)
    player = OutsidePlayer(desk, world, context(), LIMITS, terms, 60.0, lambda _: {})
    result = await player.play(task(), NoJournal())
    assert result.outcome is (Outcome.OK if rewarded else Outcome.TIMEOUT)
    if rewarded:
        assert world.log == ["offer", "export", "give up", "export"]
    else:
        assert world.log == ["offer", "export", "give up", "end timeout", "close g7.2"]
        assert result.reason == "no agent ended the episode within 20 s"
    assert result.deadline_unix_s == LateDesk.started_unix_s + 20.0
