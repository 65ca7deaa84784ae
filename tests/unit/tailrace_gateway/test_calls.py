"""Calls of a session that are in flight at the same time."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.channel.generation import Generation
from tailrace.clock import SystemClock
from tailrace.sdk.policy import PromptTooLongError, TurnRequest
from tailrace_cli.console import plain_console
from tailrace_cli.terminal.gateway import SessionsHere
from tailrace_cli.terminal.screen import Screen
from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.errors import ContextOverflowError, OverloadedError, SessionOverError
from tailrace_gateway.core.gateway import Gateway, Renderers
from tailrace_gateway.core.sampling import PromiseRule
from tailrace_gateway.core.sessions import Identity
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.session import OpenSession, SessionLimits
from tests.world.byte_model import renderer

MAX_CALLS = 8
VOTE = ModelCall(messages=(ChatMessage("user", "which one?"),))
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


class FullPolicy(SeededPolicy):
    """Policy of an engine without room for a reply."""

    async def generate(self, request: TurnRequest) -> Generation:
        raise PromptTooLongError("e1.0", 70, 64)


def gateway_over(policy: SeededPolicy) -> Gateway:
    plain = renderer()
    store: Any = SessionsHere(Screen(plain_console(file=io.StringIO())))
    return Gateway.over(
        policy,
        store,
        Identity("run", "an admin key of 24 letters", plain.stop_token_ids, 60.0, 60.0),
        Renderers(plain, plain, "keep"),
        SystemClock(),
        max_concurrent_calls=MAX_CALLS,
        promises=PromiseRule(),
    )


async def test_a_conversation_that_outgrows_the_engine_is_refused_by_its_length_and_kept_so() -> None:
    gateway = gateway_over(FullPolicy())
    await gateway.sessions.open(SEEDED)
    call = await gateway.calls.begin("e1", VOTE, "vote", is_retry=False, streams=False)
    assert call.task is not None
    with pytest.raises(ContextOverflowError, match=r"64 tokens\. However, .* 70 tokens"):
        await call.task
    session = gateway.sessions.known("e1")
    assert session is not None
    assert session.refusals == {"context_length_exceeded"}


async def test_equal_calls_at_the_same_time_have_seeds_of_their_own() -> None:
    policy = SeededPolicy()
    gateway = gateway_over(policy)
    await gateway.sessions.open(SEEDED)
    running = [
        await gateway.calls.begin("e1", VOTE, "vote", is_retry=False, streams=False) for _ in range(3)
    ]
    policy.answers.set()
    for one in running:
        assert one.task is not None
        await one.task
    last = await gateway.calls.begin("e1", VOTE, "vote", is_retry=False, streams=False)
    assert last.task is not None
    await last.task
    assert len(set(policy.seeds)) == len(policy.seeds) == 4


async def test_a_call_that_its_session_ends_before_its_first_step_is_not_in_flight() -> None:
    gateway = gateway_over(SeededPolicy())
    await gateway.sessions.open(SEEDED)
    call = await gateway.calls.begin("e1", VOTE, "vote", is_retry=False, streams=False)
    session = gateway.sessions.known("e1")
    assert session is not None
    gateway.sessions.forget("e1")  # in the same iteration of the loop
    assert call.task is not None
    await asyncio.wait({call.task})
    with pytest.raises(SessionOverError):
        call.result()
    assert not gateway.calls.running
    assert not session.calls
    assert not session.by_name


async def test_no_more_calls_run_than_the_limit_when_all_wait_for_their_session() -> None:
    policy = SeededPolicy()
    gateway = gateway_over(policy)
    ids = [f"e{index}" for index in range(MAX_CALLS + 1)]
    for episode_id in ids:
        await gateway.sessions.open(msgspec.structs.replace(SEEDED, episode_id=episode_id))
        gateway.sessions.forget(episode_id)  # the store has it still
    all_asked, read = asyncio.Barrier(len(ids)), gateway.sessions.refresh

    async def slow(*args: Any, **named: Any) -> Any:
        await all_asked.wait()
        return await read(*args, **named)

    gateway.sessions.refresh = slow  # type: ignore[method-assign]
    begun = await asyncio.gather(
        *(gateway.calls.begin(one, VOTE, "vote", is_retry=False, streams=False) for one in ids),
        return_exceptions=True,
    )
    assert [type(one) for one in begun].count(OverloadedError) == 1
    assert len(gateway.calls.running) == MAX_CALLS
    policy.answers.set()
    await asyncio.wait([call.task for call in gateway.calls.running if call.task is not None])
    assert not gateway.calls.running
