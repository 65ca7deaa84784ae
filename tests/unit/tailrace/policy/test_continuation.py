"""A turn over failing servers: nothing sampled is lost or sampled twice, and trying ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.channel.errors import (
    ChannelError,
    ChannelFullError,
    GenerateRefusedError,
    OversizeRequestError,
)
from tailrace.channel.generation import Generation
from tailrace.channel.ports import Address
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.sdk.policy import GenerationFailedError, OnChunk, PromptTooLongError, TurnRequest
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.control import bound_source
from tailrace_protos.episode import Lease
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    Guide,
    SamplingParams,
    TokenChunk,
    TokenSpan,
)
from tests.unit.tailrace.policy.fakes import (
    Answer,
    RoundRobinPlacement,
    ScriptedClient,
    generation,
)

PROMPT = pack_int32([1, 2, 3])


def lost(*ids: int, version: int = 1) -> ChannelError:
    return ChannelError("s0", "server gone", generation(ids, version, reason=None))


def refused(code: CallErrorCode, limit_tokens: int = 0) -> GenerateRefusedError:
    error = CallError(code, "because", limit_tokens=limit_tokens)
    return GenerateRefusedError("s0", error, generation(()))


class World:
    def __init__(self, *answers: Answer, max_attempts: int = 4) -> None:
        self.client = ScriptedClient(*answers)
        self.placement = RoundRobinPlacement()
        self.stages = Stages()
        self.policy = ContinuingPolicy(
            self.placement, self.client, self.stages, max_attempts=max_attempts, max_delay_s=0.05
        )

    async def turn(
        self,
        max_new_tokens: int = 10,
        turn: int = 0,
        stop: int = 99,
        on_chunk: OnChunk | None = None,
        guide: Guide | None = None,
    ) -> Generation:
        return await self.policy.generate(
            TurnRequest(
                PROMPT,
                max_new_tokens,
                SamplingParams(stop_token_ids=(stop,), seed=5),
                "g0.1",
                turn,
                on_chunk,
                guide=guide,
            )
        )

    @property
    def prompts(self) -> list[list[int]]:
        return [as_int32(request.prompt_ids).tolist() for request in self.client.requests]


async def test_an_episode_stays_on_its_server_and_frees_it_at_its_end() -> None:
    world = World(generation([7, 99]), generation([8, 99]))
    world.policy.begin("g0.1")
    await world.turn(turn=0)
    await world.turn(turn=1)
    world.policy.end("g0.1")
    assert world.client.servers == ["s0", "s0"]
    assert world.placement.asked == [("g0.1", "")]
    assert world.placement.released == ["g0.1"]
    assert world.client.released == [("s0", "g0.1")]
    assert world.placement.calls == [("s0", True), ("s0", True)]
    assert len({request.call_id for request in world.client.requests}) == 2
    assert world.stages.num_generating == 0


async def test_an_episode_with_a_server_in_its_task_asks_only_after_a_long_pause() -> None:
    world = World(*[generation([7, 99])] * 3)
    world.policy.begin("g0.1", Lease("g0.1", "s7", "subject", "", ask_after_s=1e9))
    await world.turn(turn=0)
    await world.turn(turn=1)
    assert (world.client.servers, world.placement.asked) == (["s7", "s7"], [])
    turn = [("g0.1", "s7", 3, False), ("g0.1", "s7", 3 + 2, True)]
    assert world.placement.turns == turn * 2
    world.placement.ask_after_s = 0.0
    await asyncio.sleep(0.001)
    await world.turn(turn=2)
    assert world.placement.asked == [("g0.1", "")]
    assert world.placement.contexts == [3]
    assert world.client.servers == ["s7", "s7", "s0"]
    assert world.client.released == [("s7", "g0.1")]


async def test_a_lease_granted_while_nobody_waited_any_more_is_free_too() -> None:
    world = World()
    world.policy.begin("g0.1")
    world.policy.end("g0.1")  # its deadline passed while it asked
    assert world.placement.released == ["g0.1"]


async def test_a_turn_that_outlives_its_episode_keeps_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    asked, granted, lease = asyncio.Event(), asyncio.Event(), world.placement.lease

    async def late(*args: Any, **named: Any) -> Address:
        asked.set()
        await granted.wait()
        return await lease(*args, **named)

    monkeypatch.setattr(world.placement, "lease", late)
    world.policy.begin("g0.1")
    turn = asyncio.create_task(world.turn(turn=0))
    await asked.wait()
    world.policy.end("g0.1")
    granted.set()
    with pytest.raises(GenerationFailedError, match="the episode has ended"):
        await turn
    assert world.placement.released == ["g0.1"] * 2
    assert not world.client.requests
    assert not world.policy._places


async def test_a_lost_call_goes_on_elsewhere_after_the_tokens_that_came() -> None:
    world = World(lost(7, 8, version=1), generation([9, 99], version=2))
    result = await world.turn(max_new_tokens=10)
    assert result.token_ids.tolist() == [7, 8, 9, 99]
    assert result.spans == (TokenSpan(1, "s0", 2), TokenSpan(2, "s1", 2))
    assert len(result.inference_logprobs) == 4
    assert result.finish_reason is FinishReason.STOP
    assert world.client.servers == ["s0", "s1"]
    assert world.prompts == [[1, 2, 3], [1, 2, 3, 7, 8]]
    second = world.client.requests[1]
    assert (second.max_new_tokens, second.num_continued) == (8, 2)
    assert second.sampling == world.client.requests[0].sampling
    assert second.call_id != world.client.requests[0].call_id
    assert world.placement.asked[1] == ("g0.1", "s0")
    assert world.placement.calls == [("s0", False), ("s1", True)]


async def test_tokens_that_a_guide_bound_are_marked_on_each_server() -> None:
    world = World(lost(7, 8), generation([9, 99]))
    result = await world.turn(guide=Guide(json_schema="{}"))
    assert result.spans == (
        TokenSpan(1, bound_source("s0"), 2),
        TokenSpan(1, bound_source("s1"), 2),
    )


async def test_tokens_are_passed_on_as_they_come() -> None:
    world = World(lost(7, 8, version=1), generation([9, 99], version=2))
    streamed: list[TokenChunk] = []
    result = await world.turn(on_chunk=streamed.append)
    assert [as_int32(chunk.token_ids).tolist() for chunk in streamed] == [[7], [8], [9], [99]]
    assert [chunk.spans[0].policy_version for chunk in streamed] == [1, 1, 2, 2]
    assert {chunk.finish_reason for chunk in streamed} == {None}
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_caller_who_stops_waiting_aborts_the_call(is_streamed: bool) -> None:
    world = World(generation([7, 8], reason=None))
    arrived = asyncio.Event()
    on_chunk = (lambda chunk: arrived.set()) if is_streamed else None
    turn = asyncio.create_task(world.turn(on_chunk=on_chunk))
    while not world.client.requests:
        await asyncio.sleep(0)
    if is_streamed:
        await arrived.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert world.client.aborted == [world.client.requests[0].call_id]
    assert world.stages.num_generating == 0


async def test_the_next_turn_stays_where_the_last_one_ended() -> None:
    world = World(lost(), generation([9, 99]), generation([8, 99]))
    await world.turn(turn=0)
    await world.turn(turn=1)
    assert world.client.servers == ["s0", "s1", "s1"]


@given(cuts=st.lists(st.integers(0, 4), max_size=5), length=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
async def test_wherever_servers_fail_the_tokens_are_those_of_one_unbroken_call(
    cuts: list[int], length: int
) -> None:
    whole = list(range(100, 100 + length))

    def upto(count: int | None) -> Answer:
        def answer(request: GenerateRequest) -> Generation | Exception:
            left = whole[request.num_continued :][: request.max_new_tokens]
            assert as_int32(request.prompt_ids).tolist() == [1, 2, 3, *whole[: request.num_continued]]
            return generation(left) if count is None else lost(*left[:count])

        return answer

    world = World(*map(upto, cuts), upto(None), max_attempts=100)
    world.policy._max_delay_s = 0.051
    streamed: list[TokenChunk] = []
    result = await world.turn(max_new_tokens=length, stop=whole[-1], on_chunk=streamed.append)
    assert result.token_ids.tolist() == whole
    assert [id for chunk in streamed for id in as_int32(chunk.token_ids).tolist()] == whole
    assert sum(span.num_tokens for span in result.spans) == length


@pytest.mark.parametrize(
    ("ids", "reason"), [((7, 99), FinishReason.STOP), ((7, 8, 9), FinishReason.LENGTH)]
)
async def test_a_call_that_lost_only_the_news_of_its_end_is_not_repeated(
    ids: tuple[int, ...], reason: FinishReason
) -> None:
    world = World(lost(*ids))
    result = await world.turn(max_new_tokens=3)
    assert result.token_ids.tolist() == list(ids)
    assert result.finish_reason is reason


async def test_a_server_that_aborts_by_itself_is_continued() -> None:
    world = World(generation([7], reason=FinishReason.ABORT), generation([99]))
    result = await world.turn()
    assert result.token_ids.tolist() == [7, 99]
    assert world.placement.calls[0] == ("s0", False)


@pytest.mark.parametrize("code", [CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY])
async def test_a_full_or_starting_server_is_asked_again_without_blame(code: CallErrorCode) -> None:
    world = World(refused(code), generation([99]))
    assert (await world.turn()).token_ids.tolist() == [99]
    assert world.placement.calls == [("s1", True)]


async def test_an_invalid_request_is_not_tried_again() -> None:
    world = World(refused(CallErrorCode.INVALID))
    with pytest.raises(GenerationFailedError, match="invalid: because"):
        await world.turn()
    assert len(world.client.requests) == 1
    assert world.placement.calls == []


async def test_a_prompt_without_room_in_the_engine_is_told_with_the_limit_and_is_nobodys_fault() -> (
    None
):
    world = World(refused(CallErrorCode.TOO_LONG, 3))
    with pytest.raises(PromptTooLongError) as caught:
        await world.turn()
    assert (caught.value.num_prompt, caught.value.limit_tokens) == (3, 3)
    assert world.placement.calls == []


async def test_a_reply_that_fills_the_next_servers_longest_sequence_ends_there() -> None:
    world = World(lost(7, 8), refused(CallErrorCode.TOO_LONG, 5))
    result = await world.turn(max_new_tokens=10)
    assert result.token_ids.tolist() == [7, 8]
    assert result.finish_reason is FinishReason.LENGTH


async def test_a_request_too_large_for_the_channel_is_not_tried_again() -> None:
    world = World(OversizeRequestError("c", 10, 5))
    with pytest.raises(GenerationFailedError, match="10 bytes"):
        await world.turn()


async def test_a_full_channel_is_tried_again_and_is_nobodys_fault() -> None:
    world = World(ChannelFullError("s0", 5), generation([99]))
    assert (await world.turn()).num_tokens == 1
    assert world.placement.asked[1][1] == ""
    assert world.placement.calls == [("s1", True)]


async def test_trying_ends_when_no_attempt_brings_a_token() -> None:
    world = World(*[lost() for _ in range(20)], max_attempts=4)
    with pytest.raises(GenerationFailedError) as caught:
        await world.turn()
    assert len(world.client.requests) == 5
    assert caught.value.num_attempts == 5
    assert "server gone" in caught.value.reason


async def test_attempts_that_bring_tokens_do_not_count_as_failed_in_a_row() -> None:
    world = World(*[lost(7) for _ in range(9)], generation([99]), max_attempts=2)
    result = await world.turn(max_new_tokens=20)
    assert result.token_ids.tolist() == [7] * 9 + [99]


async def test_joined_arrays_keep_their_types() -> None:
    result = await World(lost(7), generation([99])).turn()
    assert result.token_ids.dtype == np.int32
    assert result.inference_logprobs.dtype == np.float32
