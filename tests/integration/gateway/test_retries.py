"""Repeated calls, calls without listeners, and calls that cannot be captured."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tailrace.bus import CallFailedError
from tailrace_gateway import metrics
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.session import SessionExport
from tests.integration.gateway.replicas import other_url, stop, two_replicas, with_own_redis
from tests.world.gateway import GatewayWorld
from tests.world.serving import eventually

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}


async def ask(client: httpx2.AsyncClient, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await client.post("chat/completions", json=CHAT, headers=named)).json()


async def test_a_retry_of_a_running_call_waits_for_it(world: GatewayWorld) -> None:
    world.model.hold = True
    client = world.http(await world.open())
    first = asyncio.create_task(ask(client, x_stainless_retry_count="0"))
    await eventually(lambda: world.model.num_held == 1)
    retry = asyncio.create_task(ask(client, x_stainless_retry_count="1"))
    third = asyncio.create_task(ask(client, x_stainless_retry_count="2"))
    await asyncio.sleep(0)
    world.model.release()
    answers = await asyncio.gather(first, retry, third)
    assert {answer["id"] for answer in answers} == {answers[0]["id"]}
    assert len(world.model.requests) == 1
    assert (await world.export()).metrics["num_calls"] == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_retry_of_an_answered_call_gets_the_answer_again(
    world: GatewayWorld, streams: bool
) -> None:
    client = world.openai(await world.open())

    async def say(count: str) -> tuple[str, str, str]:
        headers = {"x-stainless-retry-count": count}
        answer: Any = await client.chat.completions.create(
            **CHAT, stream=streams, extra_headers=headers
        )  # type: ignore[call-overload]
        if not streams:
            choice = answer.choices[0]
            return answer.id, choice.message.content, choice.finish_reason
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return chunks[0].id, text, chunks[-1].choices[0].finish_reason

    assert await say("0") == await say("1")
    assert len(world.model.requests) == 1


@pytest.mark.parametrize("count", [b"\xb2", b"9" * 5000, b"", b"x"])
async def test_a_retry_count_may_be_any_text(world: GatewayWorld, count: bytes) -> None:
    client = world.http(await world.open())
    headers = {b"x-stainless-retry-count": count}
    answer = await client.post("chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200


async def test_an_idempotency_key_names_a_call_also_on_another_replica(world: GatewayWorld) -> None:
    opened = await world.open()
    client = world.http(opened)
    first = await ask(client, idempotency_key="k1")
    await world.start_gateway("gateway-1")
    other = httpx2.AsyncClient(
        base_url=(await other_url(world, opened.base_url)), headers=client.headers, timeout=60.0
    )
    world.stack.push_async_callback(other.aclose)
    assert (await ask(other, idempotency_key="k1"))["id"] == first["id"]
    assert (await ask(other, idempotency_key="k2"))["id"] != first["id"]
    assert len(world.model.requests) == 2


def num_waiting() -> float:
    samples = [sample for family in metrics.WAITING_RETRIES.collect() for sample in family.samples]
    return sum(sample.value for sample in samples)


@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k1"}])
async def test_two_retries_of_one_call_on_two_replicas_are_one_sample(
    world: GatewayWorld, mark: dict[str, str]
) -> None:
    first, other = await two_replicas(world, await world.open())
    world.model.hold = True
    here = asyncio.create_task(ask(first, **mark))
    await eventually(lambda: world.model.num_held == 1)
    there = asyncio.create_task(ask(other, **mark))
    await eventually(lambda: num_waiting() == 1)
    world.model.release()
    answers = await asyncio.gather(here, there)
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["id"] == answers[1]["id"]
    assert len(world.model.requests) == 1
    assert (await world.export()).metrics["num_calls"] == 1


async def test_a_retry_goes_on_where_the_one_it_waited_for_was_given_up(world: GatewayWorld) -> None:
    first, other = await two_replicas(world, await world.open())
    world.model.hold = True
    here = asyncio.create_task(ask(first, idempotency_key="k1"))
    await eventually(lambda: world.model.num_held == 1)
    there = asyncio.create_task(ask(other, idempotency_key="k1"))
    await eventually(lambda: num_waiting() == 1)
    here.cancel()
    await eventually(lambda: len(world.model.aborted) == 1)
    await eventually(lambda: world.model.num_held == 1)
    world.model.release()
    assert (await there)["choices"][0]["message"]["content"] == "Hello there."
    assert (await world.export()).metrics["num_calls"] == 1


async def test_equal_requests_without_a_mark_are_samples_of_their_own(world: GatewayWorld) -> None:
    client = world.http(await world.open())
    answers = await asyncio.gather(*(ask(client) for _ in range(3)))
    assert len({answer["id"] for answer in answers}) == 3
    assert (await world.export()).metrics["num_calls"] == 3


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_goes_away_aborts_its_call_and_leaves_nothing(
    world: GatewayWorld, streams: bool
) -> None:
    world.model.hold, world.model.num_before_hold = True, 3
    opened = await world.open()
    client = world.http(opened)
    asking = asyncio.create_task(client.post("chat/completions", json={**CHAT, "stream": streams}))
    await eventually(lambda: world.model.num_held == 1)
    asking.cancel()
    await asyncio.wait({asking})
    await eventually(lambda: len(world.model.aborted) == 1)
    session = (await world.http(opened).get("sessions/current")).json()
    assert session["metrics"]["num_calls"] == 0
    assert session["num_sampled_tokens"] == 0


async def test_a_client_that_goes_away_leaves_the_call_to_its_retry(world: GatewayWorld) -> None:
    world.model.hold = True
    client = world.http(await world.open())
    first = asyncio.create_task(ask(client))
    await eventually(lambda: world.model.num_held == 1)
    retry = asyncio.create_task(ask(client, x_stainless_retry_count="1"))
    await asyncio.sleep(0.2)  # the retry has arrived; if not, it begins a call of its own
    first.cancel()
    await asyncio.wait({first})
    world.model.release()
    assert (await retry)["choices"][0]["message"]["content"] == "Hello there."


async def exported_at_last(world: GatewayWorld, rewards: dict[str, float]) -> SessionExport:
    """Return the export as soon as the store answers in time again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await world.export(rewards=rewards)
            except CallFailedError as error:
                if error.code is not CallErrorCode.NOT_READY:
                    raise
                await asyncio.sleep(error.retry_after_s)


async def test_a_call_that_cannot_be_captured_is_answered_and_never_trained(
    empty_world: GatewayWorld, tmp_path: Path
) -> None:
    world = empty_world
    own = await with_own_redis(world, tmp_path)
    await world.start_gateway(store_timeout_s=2.0)
    client = world.openai(await world.open(), max_retries=0)
    await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    stop(own, world)
    answer = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "Hello there."
    assert own.process is not None
    own.process.send_signal(signal.SIGCONT)
    export = await exported_at_last(world, {answer.id: 1.0})
    assert export.metrics["num_calls"] == 2
    assert export.metrics["num_masked_calls"] == 1
    assert len(export.rows) == 1


async def test_what_follows_a_call_that_could_not_be_captured_is_kept_for_all_replicas(
    empty_world: GatewayWorld, tmp_path: Path
) -> None:
    world = empty_world
    own = await with_own_redis(world, tmp_path)
    world.settings["store_timeout_s"] = 2.0
    await world.start_gateway()
    first, other = await two_replicas(world, await world.open())
    said: list[dict[str, str]] = []

    async def ask_first() -> None:
        said.append({"role": "user", "content": "And?"})
        answer = await first.post("chat/completions", json={"messages": said})
        said.append(answer.json()["choices"][0]["message"])

    await ask_first()
    stop(own, world)
    await first.get("sessions/current")  # waits for its answer: the next append is never sent
    await ask_first()
    assert own.process is not None
    own.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60):  # until the store answers in time again
        while (await other.get("sessions/current")).status_code != 200:
            await asyncio.sleep(0.05)
    await ask_first()
    seen = await other.get("sessions/current")
    assert seen.status_code == 200, seen.text
    assert seen.json()["metrics"]["num_calls"] == 3
    assert seen.json()["metrics"]["num_masked_calls"] == 1
