"""Capture of calls in a log that answers late or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tailrace.channel.generation import Generation
from tailrace.ledger import Ledger
from tailrace.store import StoreError
from tailrace_gateway.core.call import CallStart, Completion, ReplyChoice, StopReason
from tailrace_gateway.core.capture import Capture, SampledReply
from tailrace_gateway.core.session import Session
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.session import OpenSession, SessionLimits
from tests.world.byte_model import renderer

RECORD = OpenSession("e1", SessionLimits(1000, 1000, 2e9))
PROMPT = np.array([5, 6], np.int32)


class LateLog:
    """A session's log; appends wait until `answers` is set, and fail with `error` if there is one."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.arrived = asyncio.Event()
        self.answers = asyncio.Event()
        self.error: StoreError | None = None

    async def append(
        self, session_id: str, nonce: str, entry_id: str, entries: Sequence[bytes], **answer: Any
    ) -> int:
        self.arrived.set()
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        self.entries += entries
        return len(self.entries)


def new_session() -> Session:
    return Session(RECORD, "nonce", "key", Ledger(renderer()), SamplingParams())


async def keep(capture: Capture, session: Session, completion_id: str, said: Sequence[int]) -> None:
    """Capture a reply of one token to a prompt of tokens."""
    prompt = session.ledger.prepare_tokens(np.array(said, np.int32))
    ids, logprobs = np.array([7], np.int32), np.array([-0.5], np.float32)
    spans = (TokenSpan(1, "", 1),)
    generation = Generation(ids, logprobs, spans, FinishReason.STOP, None, 0)
    reply = ChatMessage("assistant", "x")
    choice = ReplyChoice(0, completion_id, reply, StopReason.STOP, None, ids, logprobs)
    completion = Completion(CallStart(completion_id, 1, (prompt.prompt_ids,)), (choice,), 0)
    parsed: Any = reply
    await capture.keep(session, [prompt], [[SampledReply(generation, parsed)]], completion, "name")


def restored(log: LateLog) -> Session:
    """The session as another replica reads it."""
    session = new_session()
    session.apply(log.entries, 0)
    return session


async def test_a_call_that_is_cancelled_while_it_is_captured_is_captured_all_the_same() -> None:
    log, session = LateLog(), new_session()
    kept: Any = log
    keeping = asyncio.create_task(keep(Capture(kept), session, "call", [5, 6]))
    await log.arrived.wait()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    log.answers.set()
    async with asyncio.timeout(60):
        while session.num_read < 1:
            await asyncio.sleep(0)
    assert [node.is_masked for node in session.ledger.nodes] == [False]
    assert restored(log).ledger.nodes == session.ledger.nodes


async def test_a_call_that_the_log_refused_comes_into_it_masked_with_the_next_one() -> None:
    log, session = LateLog(), new_session()
    kept: Any = log
    log.answers.set()
    capture = Capture(kept)
    log.error = StoreError("away")
    await keep(capture, session, "first", [5, 6])
    log.error = None
    await keep(capture, session, "second", [5, 6, 7, 8])
    nodes = restored(log).ledger.nodes
    assert [(node.completion_id, node.parent_id) for node in nodes] == [
        ("first", ""),
        ("second", "first"),
    ]
    assert [node.is_masked for node in nodes] == [True, False]
    assert nodes == session.ledger.nodes
    assert (session.num_read, session.is_behind) == (2, False)
    await keep(capture, session, "third", [9])
    assert len(log.entries) == 3
