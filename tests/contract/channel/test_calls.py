"""Calls while both ends are alive, over both transports."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tailrace.channel import (
    Address,
    ChannelClosedError,
    ChannelError,
    ChannelFullError,
    ClientChannelConfig,
    DuplicateCallError,
    GenerateRefusedError,
    NoRouteError,
    OversizeRequestError,
    ServerChannelConfig,
)
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.generation import (
    CallError,
    CallErrorCode,
    FinishReason,
    SamplingParams,
    TokenChunk,
    TokenSpan,
)
from tests.contract.channel.harness import (
    QUICK,
    QUICK_SERVER,
    CountingEngine,
    Ends,
    HeldEngine,
    chunk,
    request,
)
from tests.world.samples import sample


async def test_a_collected_call_has_every_token_with_its_logprob_and_version(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    sink = engine.sinks["c1"]
    sink.send(chunk("c1", 0, 40, policy_version=7))
    sink.send(chunk("c1", 40, 2, policy_version=7))
    sink.send(chunk("c1", 42, 5, FinishReason.STOP, policy_version=8, num_cached_tokens=6))
    generation = await call.collect()
    assert generation.token_ids.tolist() == list(range(47))
    assert generation.inference_logprobs.tolist() == [-0.5 * i for i in range(47)]
    assert generation.spans == (TokenSpan(7, "", 42), TokenSpan(8, "", 5))
    assert generation.finish_reason is FinishReason.STOP
    assert generation.num_cached_tokens == 6


async def test_the_server_sees_the_request_as_it_was_made(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    made = request("c1", num_prompt=2000)
    made = type(made)(
        "c1",
        "e7",
        made.prompt_ids,
        5,
        SamplingParams(temperature=0.5, stop=("\n",)),
        3,
        "00-abc-def-01",
    )
    client.generate(ends.address(), made)
    await engine.got("c1")
    seen = engine.requests[0]
    assert as_int32(seen.prompt_ids).tolist() == list(range(2000))
    assert (seen.episode_id, seen.max_new_tokens, seen.num_continued) == ("e7", 5, 3)
    assert seen.sampling == made.sampling
    assert seen.traceparent == "00-abc-def-01"


async def test_chunks_stream_while_the_call_runs(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    seen: list[int] = []
    for start in range(0, 30, 3):
        engine.sinks["c1"].send(chunk("c1", start, 3, FinishReason.LENGTH if start == 27 else None))
        part = await anext(call)
        ids = as_int32(part.token_ids)
        assert as_float32(part.inference_logprobs).tolist() == (-0.5 * ids).tolist()
        seen += ids.tolist()
    assert seen == list(range(30))
    assert part.finish_reason is FinishReason.LENGTH
    with pytest.raises(StopAsyncIteration):
        await anext(call)


async def test_a_call_without_tokens_still_yields_its_last_chunk(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 0, FinishReason.STOP))
    chunks = [part async for part in call]
    assert [part.finish_reason for part in chunks] == [FinishReason.STOP]


async def test_two_thousand_concurrent_calls_each_get_their_own_tokens(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    client = await ends.client(ClientChannelConfig(max_outstanding_calls=500))
    calls = [client.generate(ends.address(), request(f"c{n}", 500, 1 + n % 50)) for n in range(2000)]
    generations = await asyncio.gather(*(call.collect() for call in calls))
    for number, generation in enumerate(generations):
        assert generation.token_ids.tolist() == list(range(1 + number % 50))
        assert generation.finish_reason is FinishReason.LENGTH


async def test_calls_made_in_one_tick_share_frames_both_ways(ends: Ends) -> None:
    await ends.serve(CountingEngine(), ServerChannelConfig(keepalive_s=60, silence_s=120))
    client = await ends.client(ClientChannelConfig(keepalive_s=60, silence_s=120))
    await client.generate(ends.address(), request("first")).collect()
    frames = {
        (side, direction): sample("tailrace_channel_frames_total", side=side, direction=direction)
        for side in ("client", "server")
        for direction in ("in", "out")
    }
    calls = [client.generate(ends.address(), request(f"c{n}")) for n in range(100)]
    await asyncio.gather(*(call.collect() for call in calls))
    for (side, direction), before in frames.items():
        after = sample("tailrace_channel_frames_total", side=side, direction=direction)
        assert after - before <= 3, f"{after - before} frames {direction} at the {side} for 100 calls"


async def test_tokens_leave_with_the_loop_tick_and_those_of_one_tick_as_one_chunk(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    before = sample("tailrace_channel_chunks_total", side="server")
    for index in range(16):
        engine.sinks["c1"].send(chunk("c1", index, 1))
    async with asyncio.timeout(60):
        part = await anext(call)
    assert as_int32(part.token_ids).tolist() == list(range(16))
    engine.sinks["c1"].send(chunk("c1", 16, 4, FinishReason.STOP))
    generation = await call.collect()
    assert generation.token_ids.tolist() == list(range(20))
    assert generation.spans == (TokenSpan(1, "", 20),)
    assert sample("tailrace_channel_chunks_total", side="server") - before == 2


async def test_an_aborted_call_ends_with_what_it_has(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 3))
    await anext(call)
    call.abort()
    generation = await call.collect()
    assert engine.aborted == ["c1"]
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.token_ids.tolist() == [0, 1, 2]


async def test_a_release_follows_the_aborts_of_its_episode_and_needs_no_answer(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    client.release_prefix(ends.address(), "no link yet")
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    call.abort()
    client.release_prefix(ends.address(), "e1")
    await engine.until(lambda: engine.released == ["e1"])
    assert engine.aborted == ["c1"]
    assert (await call.collect()).finish_reason is FinishReason.ABORT
    client.release_prefix(ends.address(), "e1")
    await engine.until(lambda: engine.released == ["e1", "e1"])


async def test_cancelling_a_collector_aborts_its_call(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    task = asyncio.create_task(client.generate(ends.address(), request("c1")).collect())
    await engine.got("c1")
    task.cancel()
    await engine.until(lambda: engine.aborted == ["c1"])
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_server_is_raised_with_code_and_partial_tokens(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 2))
    error = CallError(CallErrorCode.OVERLOADED, "no room", 1.5)
    engine.sinks["c1"].send(TokenChunk("c1", error=error))
    with pytest.raises(GenerateRefusedError, match="overloaded: no room") as raised:
        await call.collect()
    assert raised.value.code is CallErrorCode.OVERLOADED
    assert raised.value.retry_after_s == 1.5
    assert raised.value.server_id == "s1"
    assert raised.value.partial.token_ids.tolist() == [0, 1]


async def test_a_reader_gets_the_tokens_before_the_error(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 2))
    engine.sinks["c1"].send(TokenChunk("c1", error=CallError(CallErrorCode.INTERNAL, "boom")))
    part = await anext(call)
    assert as_int32(part.token_ids).tolist() == [0, 1]
    with pytest.raises(GenerateRefusedError, match="boom"):
        await anext(call)


async def test_a_request_over_the_limit_is_refused_with_bytes_limit_and_remedy(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    client = await ends.client()
    with pytest.raises(OversizeRequestError, match="shorten the prompt") as raised:
        client.generate(ends.address(), request("big", num_prompt=2_200_000))
    assert raised.value.num_bytes > 8_800_000
    assert raised.value.limit_bytes <= 8 << 20
    generation = await client.generate(ends.address(), request("big")).collect()
    assert generation.num_tokens == 8


async def test_prompts_near_the_limit_and_long_answers_are_split_over_frames(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    names = [f"c{n}" for n in range(6)]
    calls = [client.generate(ends.address(), request(name, num_prompt=250_000)) for name in names]
    await engine.got(*names)
    for name in names:
        engine.sinks[name].send(chunk(name, 0, 400_000, FinishReason.LENGTH))
    expected = np.arange(400_000, dtype=np.int32)
    for call in calls:
        generation = await call.collect()
        assert np.array_equal(generation.token_ids, expected)
        assert generation.spans == (TokenSpan(1, "", 400_000),)


async def test_a_call_id_in_flight_is_refused_until_the_call_has_ended(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    first = client.generate(ends.address(), request("c1"))
    with pytest.raises(DuplicateCallError):
        client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    engine.sinks["c1"].send(chunk("c1", 0, 1, FinishReason.STOP))
    await first.collect()
    again = client.generate(ends.address(), request("c1"))
    await engine.until(lambda: len(engine.requests) == 2)
    engine.sinks["c1"].send(chunk("c1", 5, 1, FinishReason.STOP))
    assert (await again.collect()).token_ids.tolist() == [5]


async def test_a_call_id_that_another_client_has_in_flight_is_refused_by_the_server(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    one, other = await ends.client(), await ends.client()
    call = one.generate(ends.address(), request("c1"))
    await engine.got("c1")
    with pytest.raises(GenerateRefusedError, match="still running") as raised:
        await other.generate(ends.address(), request("c1")).collect()
    assert raised.value.code is CallErrorCode.OVERLOADED
    assert raised.value.retry_after_s > 0
    engine.sinks["c1"].send(chunk("c1", 0, 1, FinishReason.STOP))
    assert (await call.collect()).num_tokens == 1


async def test_calls_beyond_the_window_wait_and_calls_beyond_that_are_refused(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    config = ClientChannelConfig(max_outstanding_calls=3, max_waiting_calls=2)
    client = await ends.client(config)
    calls = [client.generate(ends.address(), request(f"c{n}")) for n in range(5)]
    with pytest.raises(ChannelFullError) as raised:
        client.generate(ends.address(), request("c5"))
    assert raised.value.num_waiting == 2
    assert sample("tailrace_channel_waiting_calls") == 2
    await engine.got("c0", "c1", "c2")
    assert len(engine.requests) == 3
    engine.sinks["c1"].send(chunk("c1", 0, 1, FinishReason.STOP))
    await engine.got("c3")
    assert "c4" not in engine.sinks
    calls[4].abort()
    assert (await calls[4].collect()).finish_reason is FinishReason.ABORT
    assert sample("tailrace_channel_waiting_calls") == 0
    assert "c4" not in engine.aborted


async def test_a_full_server_answers_overloaded(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine, ServerChannelConfig(max_server_calls=1))
    client = await ends.client()
    client.generate(ends.address(), request("c1"))
    with pytest.raises(GenerateRefusedError) as raised:
        await client.generate(ends.address(), request("c2")).collect()
    assert raised.value.code is CallErrorCode.OVERLOADED


async def test_a_handler_that_raises_fails_that_call_alone(ends: Ends) -> None:
    class Choosy(CountingEngine):
        def submit(self, request, sink) -> None:  # type: ignore[no-untyped-def]
            if request.call_id == "bad":
                raise RuntimeError("not this one")
            super().submit(request, sink)

    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    await ends.serve(Choosy())
    client = await ends.client()
    calls = {name: client.generate(ends.address(), request(name)) for name in ("a", "bad", "b", "c")}
    for name in ("a", "b", "c"):
        assert (await calls[name].collect()).num_tokens == 8
    with pytest.raises(GenerateRefusedError, match="could not begin") as raised:
        await calls["bad"].collect()
    assert raised.value.code is CallErrorCode.INTERNAL
    if ends.transport == "zmq":  # nats-py hands it to the connection's error callback
        assert reported


async def test_a_slow_client_loses_nothing_and_holds_the_server_back(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine, ServerChannelConfig(max_unconfirmed_bytes=1_000_000))
    client = await ends.client(ClientChannelConfig())
    before = sample("tailrace_channel_congestions_total", side="server")
    names = ["c1", "c2"]
    calls = [client.generate(ends.address(), request(name)) for name in names]
    await engine.got(*names)
    size, rounds = 60_000, 80
    for index in range(rounds):
        for name in names:  # no pause long enough for the client to take 80 MB
            finish = FinishReason.LENGTH if index == rounds - 1 else None
            engine.sinks[name].send(chunk(name, index * size, size, finish))
        if index % 4 == 0:
            await asyncio.sleep(0)
    expected = np.arange(rounds * size, dtype=np.int32)
    for call in calls:
        assert np.array_equal((await call.collect()).token_ids, expected)
    assert sample("tailrace_channel_congestions_total", side="server") > before


async def test_two_servers_are_independent(ends: Ends) -> None:
    engines = {name: HeldEngine() for name in ("s1", "s2")}
    for name, engine in engines.items():
        await ends.serve(engine, name=name)
    client = await ends.client()
    calls = {name: client.generate(ends.address(name), request("same-id")) for name in engines}
    for start, (name, engine) in enumerate(engines.items()):
        await engine.got("same-id")
        engine.sinks["same-id"].send(chunk("same-id", 10 * start, 1, FinishReason.STOP))
        assert (await calls[name].collect()).token_ids.tolist() == [10 * start]


async def test_an_address_without_this_transport_is_refused(ends: Ends) -> None:
    client = await ends.client()
    with pytest.raises(NoRouteError, match="s9 has no"):
        client.generate(Address("s9"), request("c1"))


async def test_closing_the_client_fails_its_calls_here_and_aborts_them_there(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine)
    client = await ends.client()
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    await client.close()
    with pytest.raises(ChannelError, match="client was closed"):
        await call.collect()
    with pytest.raises(ChannelClosedError):
        client.generate(ends.address(), request("c2"))
    await engine.until(lambda: engine.aborted == ["c1"])


async def test_an_idle_link_is_closed_and_opened_again(ends: Ends) -> None:
    await ends.serve(CountingEngine())
    client = await ends.client(ClientChannelConfig(keepalive_s=0.02, silence_s=60, idle_link_s=0.04))
    before = sample("tailrace_channel_lost_links_total", side="server", cause="closed")
    await client.generate(ends.address(), request("c1")).collect()
    async with asyncio.timeout(60):
        while sample("tailrace_channel_lost_links_total", side="server", cause="closed") == before:
            await asyncio.sleep(0.01)
    assert (await client.generate(ends.address(), request("c2")).collect()).num_tokens == 8


async def test_calls_that_stay_silent_too_long_are_given_up_and_aborted(ends: Ends) -> None:
    engine = HeldEngine(ends_aborted=False)
    await ends.serve(engine)
    client = await ends.client(ClientChannelConfig(keepalive_s=0.02, silence_s=60, chunk_timeout_s=0.1))
    call = client.generate(ends.address(), request("c1"))
    with pytest.raises(ChannelError, match=r"no chunk for 0\.1 s"):
        await call.collect()
    await engine.until(lambda: engine.aborted == ["c1"])
    with pytest.raises(DuplicateCallError):  # late chunks must not end up in a new call
        client.generate(ends.address(), request("c1"))


async def test_keepalives_keep_a_quiet_call_alive(ends: Ends) -> None:
    engine = HeldEngine()
    await ends.serve(engine, QUICK_SERVER)
    client = await ends.client(QUICK)
    call = client.generate(ends.address(), request("c1"))
    await engine.got("c1")
    frames = sample("tailrace_channel_frames_total", side="client", direction="in")
    beats = 1.5 * QUICK.silence_s / QUICK.keepalive_s
    async with asyncio.timeout(60):
        while sample("tailrace_channel_frames_total", side="client", direction="in") < frames + beats:
            await asyncio.sleep(0.02)
    assert engine.aborted == []
    engine.sinks["c1"].send(chunk("c1", 0, 1, FinishReason.STOP))
    assert (await call.collect()).num_tokens == 1
