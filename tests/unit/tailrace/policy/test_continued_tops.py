"""A turn that another server continued has the likeliest tokens of all its steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tailrace.channel.errors import ChannelError
from tailrace.channel.generation import Generation
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.sdk.policy import TurnRequest
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.generation import FinishReason, SamplingParams, TokenChunk
from tests.unit.tailrace.policy.fakes import RoundRobinPlacement, ScriptedClient, generation


def ranked(ids: list[int], reason: FinishReason | None = FinishReason.STOP) -> Generation:
    """A generation whose step with token i might have had 10 i and 10 i + 1."""
    tops = 10 * np.array(ids, np.int32)[:, None] + np.arange(2, dtype=np.int32)
    return msgspec.structs.replace(
        generation(ids, reason=reason), top_ids=tops, top_logprobs=-tops.astype(np.float32)
    )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_turn_over_two_servers_asks_both_and_keeps_the_order(streams: bool) -> None:
    client = ScriptedClient(ChannelError("s0", "server gone", ranked([7, 8], None)), ranked([9, 99]))
    policy = ContinuingPolicy(RoundRobinPlacement(), client, Stages(), max_delay_s=0.05)
    streamed: list[TokenChunk] = []
    result = await policy.generate(
        TurnRequest(
            pack_int32([1]),
            10,
            SamplingParams(stop_token_ids=(99,)),
            "g0.1",
            0,
            on_chunk=streamed.append if streams else None,
            top_logprobs=2,
        )
    )
    assert [request.top_logprobs for request in client.requests] == [2, 2]
    expected = [[70, 71], [80, 81], [90, 91], [990, 991]]
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.top_ids.tolist() == expected
    assert (-result.top_logprobs).tolist() == expected
    if streams:
        told = [as_int32(chunk.top_ids).tolist() for chunk in streamed]
        assert told == expected  # the fake brings one token a chunk


async def test_a_turn_that_does_not_ask_gets_none() -> None:
    client = ScriptedClient(generation([7, 99]))
    policy = ContinuingPolicy(RoundRobinPlacement(), client, Stages())
    result = await policy.generate(TurnRequest(pack_int32([1]), 10, SamplingParams(), "g0.1", 0))
    assert client.requests[0].top_logprobs == 0
    assert (result.top_ids, result.top_logprobs) == (None, None)
