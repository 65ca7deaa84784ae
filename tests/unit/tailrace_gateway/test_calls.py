"""Calls of a session that are in flight at the same time."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np

from tailrace.channel.generation import Generation
from tailrace.clock import SystemClock
from tailrace.sdk.policy import TurnRequest
from tailrace_cli.console import plain_console
from tailrace_cli.terminal.gateway import SessionsHere
from tailrace_cli.terminal.screen import Screen
from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.gateway import Gateway, Renderers
from tailrace_gateway.core.sampling import PromiseRule
from tailrace_gateway.core.sessions import Identity
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.session import OpenSession, SessionLimits
from tests.world.byte_model import renderer

SEEDED = OpenSession("e1", SessionLimits(1000, 1000, 2e9), SamplingParams(), sampling_seed=7)


class SeededPolicy:
    """Policy that keeps the seeds of its requests, and answers when `answers` is set."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.answers = asyncio.Event()

    def begin(self, episode_id: str) -> None:
        """Leases nothing."""

    def end(self, episode_id: str) -> None:
        """Gives nothing back."""

    async def generate(self, request: TurnRequest) -> Generation:
        self.seeds.append(request.sampling.seed)
        await self.answers.wait()
        ids, logprobs = np.array([65], np.int32), np.array([-0.5], np.float32)
        return Generation(ids, logprobs, (TokenSpan(1, "", 1),), FinishReason.STOP, None, 0)


async def test_equal_calls_at_the_same_time_have_seeds_of_their_own() -> None:
    policy, plain = SeededPolicy(), renderer()
    store: Any = SessionsHere(Screen(plain_console(file=io.StringIO())))
    gateway = Gateway.over(
        policy,
        store,
        Identity("run", "an admin key of 24 letters", plain.stop_token_ids, 60.0, 60.0),
        Renderers(plain, plain, "keep"),
        SystemClock(),
        max_concurrent_calls=8,
        promises=PromiseRule(),
    )
    await gateway.sessions.open(SEEDED)
    vote = ModelCall(messages=(ChatMessage("user", "which one?"),))
    running = [
        await gateway.calls.begin("e1", vote, "vote", is_retry=False, streams=False) for _ in range(3)
    ]
    policy.answers.set()
    for one in running:
        assert one.task is not None
        await one.task
    last = await gateway.calls.begin("e1", vote, "vote", is_retry=False, streams=False)
    assert last.task is not None
    await last.task
    assert len(set(policy.seeds)) == len(policy.seeds) == 4
