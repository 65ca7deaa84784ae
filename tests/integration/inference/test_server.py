"""A real inference server: from the model card to drained, with weights that change under its calls."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

import pytest

from tailrace.channel import Address, GenerateRefusedError, NatsGenerateClient
from tailrace_inference.__main__ import build
from tailrace_inference.adapters.emission_log import read_emissions
from tailrace_protos import subjects
from tailrace_protos.base import as_int32
from tailrace_protos.control import DrainRequest, ServerState, ServerStatus
from tailrace_protos.generation import CallErrorCode, FinishReason, TokenSpan
from tests.integration.inference.world import (
    SERVER_ID,
    World,
    address_of,
    make_model,
    own_logprobs,
    weights_of,
)
from tests.world.samples import sample

FAST = {"max_running": 16, "kv_cache_tokens": 65536, "heartbeat_s": 0.1}


PROMPT = [1, 2, 3]
NUM_TOKENS = 1000


@dataclass(frozen=True)
class Ended:
    """A call that ended, with all ids that the model saw."""

    name: str
    ids: list[int]
    logprobs: list[float]
    spans: tuple[TokenSpan, ...]
    finish_reason: FinishReason


class Calls:
    """Callers that call again and again, so that a call is under way whatever happens when."""

    def __init__(self, world: World, address: Address) -> None:
        self._stopping = False
        self._callers = [asyncio.create_task(self._call(world, address, f"c{n}")) for n in range(3)]

    async def _call(self, world: World, address: Address, caller: str) -> list[Ended]:
        ended: list[Ended] = []
        while not self._stopping:
            name = f"{caller}-{len(ended)}"
            call = world.client.generate(address, world.request(name, PROMPT, NUM_TOKENS))
            try:
                got = await call.collect()
            except GenerateRefusedError as error:  # it came when the server was leaving already
                if error.code is not CallErrorCode.NOT_READY:
                    raise
                break
            ids = [*PROMPT, *got.token_ids.tolist()]
            logprobs = got.inference_logprobs.tolist()
            ended.append(Ended(name, ids, logprobs, got.spans, got.finish_reason))
        return ended

    async def finish(self) -> list[Ended]:
        """Begin no more calls; what became of all."""
        self._stopping = True
        return [one for ended in await asyncio.gather(*self._callers) for one in ended]


@pytest.mark.parametrize("world", [{**FAST, "emission_log": True, "drain_s": 120.0}], indirect=True)
async def test_calls_see_every_version_and_the_drain_finishes_them(world: World) -> None:
    old, new = make_model(1), make_model(2)
    process = world.services.spawn()
    await world.put_card()
    status = await world.serving(await world.publish(old))
    address = address_of(status)
    first = status.policy_version

    short = await world.generate(address, world.request("short", [5, 6, 7], 12))
    expected = own_logprobs(old, [5, 6, 7, *short.token_ids.tolist()], 12)
    assert short.inference_logprobs.tolist() == pytest.approx(expected, abs=1e-4)

    calls = Calls(world, address)
    second = await world.publish(new)
    await world.serving(second)
    process.running.send_signal(signal.SIGTERM)
    ended = await calls.finish()
    across = [one for one in ended if [span.policy_version for span in one.spans] == [first, second]]

    assert {one.finish_reason for one in ended} == {FinishReason.LENGTH}
    assert across, "no call was under way when the weights changed"
    for one in across:
        num_old = one.spans[0].num_tokens
        by_old = own_logprobs(old, one.ids, NUM_TOKENS)[:num_old]
        by_new = own_logprobs(new, one.ids, NUM_TOKENS)[num_old:]
        assert one.logprobs == pytest.approx(by_old + by_new, abs=1e-4)

    assert await process.ended_async(60) == 0
    path = world.services.folder / world.run / f"emissions-{SERVER_ID}.bin"
    emissions = list(read_emissions(path))
    for one in ended:
        chunks = [e.chunk.token_ids for e in emissions if e.episode_id == f"{one.name}.episode"]
        assert [*PROMPT, *(i for ids in chunks for i in as_int32(ids).tolist())] == one.ids


@pytest.mark.parametrize("world", [{**FAST, "drain_s": 2.0}], indirect=True)
async def test_a_drain_request_aborts_what_takes_too_long_and_refuses_the_rest(world: World) -> None:
    world.services.serve("inference", build, SERVER_ID)
    await world.put_card()
    status = await world.serving(await world.publish(make_model(1)))
    nats = NatsGenerateClient(world.bus.connection.client)
    await nats.start()
    by_nats = Address(SERVER_ID, status.nats_subject)
    calls = [nats.generate(by_nats, world.request(f"call-{i}", [i], 4000)) for i in range(16)]
    while (await world.serving(status.policy_version)).num_running < 16:
        await asyncio.sleep(0.02)

    subject = subjects.inference_control(world.run, SERVER_ID)
    reply = await world.bus.request(subject, DrainRequest("test"), ServerStatus, timeout_s=60)
    assert reply.state is ServerState.DRAINING
    while (seen := await world.status()) is not None and seen.state is not ServerState.DRAINING:
        await asyncio.sleep(0.01)
    with pytest.raises(GenerateRefusedError) as refused:
        await nats.generate(by_nats, world.request("late", [1], 4)).collect()
    assert refused.value.code is CallErrorCode.NOT_READY

    ended = await asyncio.gather(*(call.collect() for call in calls))
    assert {generation.finish_reason for generation in ended} == {FinishReason.ABORT}
    assert all(generation.num_tokens > 0 for generation in ended)
    assert await world.services.serving["inference"] == 0
    await nats.close()


@pytest.mark.parametrize("world", [{**FAST, "step_in": "thread"}], indirect=True)
async def test_weights_that_do_not_fit_are_refused_and_the_old_version_stays(world: World) -> None:
    world.services.serve("inference", build, SERVER_ID)
    await world.put_card()
    good = make_model(1)
    first = await world.publish(good)
    address = address_of(await world.serving(first))

    bad = [tensor._replace(name=tensor.name + ".other") for tensor in weights_of(good)]
    num_failed = sample("tailrace_inference_failed_weight_updates_total")
    await world.publisher.publish(bad, lineage="test", optimizer_step=99)
    async with asyncio.timeout(60):
        while sample("tailrace_inference_failed_weight_updates_total") == num_failed:
            await asyncio.sleep(0.02)
    generation = await world.generate(address, world.request("still", [1, 2], 3))
    assert [span.policy_version for span in generation.spans] == [first]
    assert sample("tailrace_inference_policy_version") == first


async def test_a_model_that_cannot_run_is_the_users_mistake(world: World) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 61}
    await world.put_card({"model_type": "bert", "num_hidden_layers": 1, **sizes})  # sees later tokens
    world.services.serve("inference", build, SERVER_ID)
    assert await world.services.serving["inference"] == 2
    reason = world.services.made["inference"].stop_reason
    assert "'bert' does not run on the torch engine: its logits differ from" in reason


async def test_a_server_that_is_told_to_stop_before_it_had_weights_leaves_quietly(
    world: World,
) -> None:
    await world.put_card()
    world.services.serve("inference", build, SERVER_ID)
    async with asyncio.timeout(120):
        while (status := await world.status()) is None:
            await asyncio.sleep(0.02)
    assert status.state is ServerState.STARTING
    with pytest.raises(GenerateRefusedError) as refused:
        await world.generate(address_of(status), world.request("early", [1], 4))
    assert refused.value.code is CallErrorCode.NOT_READY
    world.services.made["inference"].stop("SIGTERM")
    assert await world.services.serving["inference"] == 0
