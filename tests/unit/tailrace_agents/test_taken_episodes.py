"""A worker that lost its episode to another one: whose message is it?"""

from __future__ import annotations

from typing import cast

import pytest

from tailrace.clock import SystemClock
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.runtime import Delivery, LeftToAnother
from tailrace.store import AppendResult, Journal, TrajectoryBuffer
from tailrace_agents.adapters.kept_episodes import EpisodeKeeper
from tailrace_agents.adapters.scoring import RewardClient
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.machine import EpisodePlayer
from tailrace_agents.handlers import EpisodeHandler, HandlerParts
from tailrace_agents.ports import EpisodeJournal
from tailrace_protos.episode import EnvTask, EpisodeTask

TASK = EpisodeTask("g.0", "g", 0, 0, "train", EnvTask("lake", 0), 2e10)
REDELIVERED_TO_US = Delivery("q", 7, 1, 2, "run.g.0.0", "reply")


class TakenJournal:
    """Of an episode that another worker continues."""

    def __init__(self, taken: AppendResult) -> None:
        self._taken = taken

    async def taken_by(self, episode_id: str) -> AppendResult:
        return self._taken


class Losing:
    """Player that learns at the end that its episode was taken."""

    is_stoppable = True

    async def play(self, task: EpisodeTask, journal: EpisodeJournal) -> EpisodeResult:
        await journal.require_own()
        raise AssertionError("not its own")


class IdlePolicy:
    def begin(self, episode_id: str, lease: object) -> None:
        """Starts nothing."""

    def end(self, episode_id: str) -> None:
        """Ends nothing."""


def handler(taken: AppendResult, messages: list[str]) -> EpisodeHandler:
    def make_journal(message: str) -> Journal:
        messages.append(message)
        return cast(Journal, TakenJournal(taken))

    return EpisodeHandler(
        HandlerParts(
            players={"lake": cast(EpisodePlayer, Losing())},
            policy=cast(ContinuingPolicy, IdlePolicy()),
            rewards=cast(RewardClient, None),
            buffer=cast(TrajectoryBuffer, None),
            make_journal=make_journal,
            clock=SystemClock(),
            stages=Stages(),
            keeper=cast(EpisodeKeeper, None),
        )
    )


async def test_the_worker_that_has_a_message_now_alone_acknowledges_it() -> None:
    messages: list[str] = []
    with pytest.raises(LeftToAnother):
        await handler(AppendResult.REDELIVERED, messages).handle(TASK, REDELIVERED_TO_US)
    assert messages == ["7-1"]


async def test_the_message_of_an_attempt_that_was_replaced_is_acknowledged() -> None:
    messages: list[str] = []
    # It returns, so that its message is acknowledged.
    await handler(AppendResult.FENCED, messages).handle(TASK, REDELIVERED_TO_US)
    assert messages == ["7-1"]
