"""Keys, limits and refusals over real HTTP: the statuses and bodies that clients act on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anthropic
import openai
import pytest

from tailrace.bus import CallFailedError
from tailrace_gateway.adapters.app import GatewayApp
from tests.world.gateway import ADMIN_KEY, GatewayWorld
from tests.world.serving import eventually

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}


def find_app(world: GatewayWorld) -> GatewayApp:
    """Return the application behind the port; only the garbage collector knows it."""
    import gc

    gc.unfreeze()  # services freeze the objects of their start, which hides them from the collector
    return next(one for one in gc.get_objects() if type(one) is GatewayApp)


async def test_every_route_wants_a_key(world: GatewayWorld) -> None:
    opened = await world.open()
    routes = find_app(world).routes
    assert len(routes) >= 12
    for key in ("", "tr-wrong"):
        client = world.http(opened, key)
        for route in routes:
            if route.is_open:
                continue
            path = route.path.replace("{model:path}", "m").replace("{session}", opened.session_id)
            answer = await client.request(route.method, f"..{path}", json={})
            assert answer.status_code == 401, path
            assert answer.headers["x-should-retry"] == "false"
    assert (await world.http(opened, "").get("../v1/made_up")).status_code == 401


async def test_both_ways_to_send_a_key_open(world: GatewayWorld) -> None:
    opened = await world.open()
    client = world.http(opened, "")
    for headers in ({"authorization": f"Bearer {opened.api_key}"}, {"x-api-key": opened.api_key}):
        answer = await client.post("chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200


async def test_clients_raise_the_errors_that_they_know(world: GatewayWorld) -> None:
    opened = await world.open()
    wrong = openai.AsyncOpenAI(base_url=opened.base_url, api_key="tr-wrong")
    with pytest.raises(openai.AuthenticationError) as refused:
        await wrong.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert refused.value.code == "invalid_api_key"
    other = anthropic.AsyncAnthropic(base_url=opened.base_url.removesuffix("/v1"), api_key="tr-wrong")
    with pytest.raises(anthropic.AuthenticationError) as refused_too:
        await other.messages.create(**CHAT, max_tokens=5)
    body: Any = refused_too.value.body
    assert body["error"]["type"] == "authentication_error"


async def test_a_sessions_key_does_not_open_another_session(world: GatewayWorld) -> None:
    opened, other = await world.open("g0.0"), await world.open("g0.1")
    client = world.http(opened)
    assert (await client.get(f"sessions/{other.session_id}")).status_code == 403
    assert (await client.post("sessions", json={})).status_code == 403
    assert (await client.get("sessions/current")).json()["session_id"] == "g0.0"
    admin = world.http(opened, ADMIN_KEY)
    assert (await admin.get(f"sessions/{other.session_id}")).status_code == 200
    assert (await admin.post("chat/completions", json=CHAT)).status_code == 403


async def test_keys_are_kept_as_hashes(world: GatewayWorld) -> None:
    opened = await world.open()
    redis = world.redis.redis
    keys = await redis.keys(f"*{world.run}*")
    values = [await redis.dump(key) for key in keys]
    assert keys
    assert not any(opened.api_key.encode() in blob for blob in [*keys, *values])


async def test_opening_again_gives_the_same_key_and_closing_ends_it(world: GatewayWorld) -> None:
    opened = await world.open()
    client = world.http(opened)
    await client.post("chat/completions", json=CHAT)
    assert (await world.open()).api_key == opened.api_key
    assert (await client.get("sessions/current")).json()["metrics"]["num_calls"] == 1
    await world.close()
    assert (await client.post("chat/completions", json=CHAT)).status_code == 401
    anew = await world.open()
    assert anew.api_key != opened.api_key
    assert (await client.post("chat/completions", json=CHAT)).status_code == 401
    assert (await world.http(anew).get("sessions/current")).json()["metrics"]["num_calls"] == 0
    await world.close("never-was")


async def test_an_exported_session_takes_no_calls_and_exports_again(world: GatewayWorld) -> None:
    opened = await world.open()
    client = world.openai(opened)
    await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    first, second = await world.export(rewards={"": 2.0}), await world.export(rewards={"": 2.0})
    assert first == second
    with pytest.raises(openai.APIStatusError) as refused:
        await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert (refused.value.status_code, refused.value.code) == (410, "session_closed")
    with pytest.raises(CallFailedError, match="there is no session"):
        await world.export("never-was")
    with pytest.raises(CallFailedError, match="no call 'nobody'"):
        await world.export(rewards={"nobody": 1.0})


async def test_a_conversation_that_is_too_long_is_refused_with_the_numbers(world: GatewayWorld) -> None:
    opened = await world.open(max_episode_tokens=40)
    long = {"role": "user", "content": "x" * 100}
    client = world.openai(opened)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=[long])  # type: ignore[list-item]
    assert refused.value.code == "context_length_exceeded"
    assert "40 tokens" in refused.value.message
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 40 maximum"):
        await world.anthropic(opened).messages.create(model="m", messages=[long], max_tokens=9)  # type: ignore[list-item]


async def test_each_call_gets_what_is_left_of_the_budget(world: GatewayWorld) -> None:
    opened = await world.open(max_new_tokens=20)
    client = world.openai(opened)
    ends = [
        (await client.chat.completions.create(**CHAT)).choices[0].finish_reason  # type: ignore[call-overload]
        for _ in range(2)
    ]
    assert ends == ["stop", "length"]
    assert [request.max_new_tokens for request in world.model.requests] == [20, 7]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert refused.value.code == "token_budget_exceeded"


async def test_a_call_ends_at_the_deadline_of_its_session_and_not_before(world: GatewayWorld) -> None:
    world.model.hold = True
    began_unix_s = time.time()
    client = world.openai(await world.open(timeout_s=6.0))
    with pytest.raises(openai.APIStatusError) as refused:
        await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert refused.value.code == "session_deadline_exceeded"
    assert time.time() - began_unix_s > 5.5
    await eventually(lambda: len(world.model.aborted) == 1)


async def test_a_full_gateway_says_when_to_come_back(empty_world: GatewayWorld) -> None:
    world = empty_world
    await world.start_gateway(max_concurrent_calls=1)
    world.model.hold = True
    client = world.http(await world.open())
    first = asyncio.create_task(client.post("chat/completions", json=CHAT))
    await eventually(lambda: world.model.num_held == 1)
    full = await client.post("chat/completions", json=CHAT)
    assert full.status_code == 429
    assert full.headers["retry-after"] == "1"
    assert full.headers["x-should-retry"] == "true"
    assert full.json()["error"]["type"] == "rate_limit_error"
    world.model.release()
    assert (await first).status_code == 200


async def test_bodies_have_a_bound_and_must_be_json(empty_world: GatewayWorld) -> None:
    world = empty_world
    await world.start_gateway(max_body_bytes=1000)
    client = world.http(await world.open())
    large = await client.post("chat/completions", content=b"x" * 1001)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")

    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 100

    chunked = await client.post("chat/completions", content=pieces())
    assert chunked.status_code == 413
    broken = await client.post("chat/completions", content=b'{"messages": [')
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    told = await client.post("../v1/messages", content=b"{")
    assert told.json()["error"]["type"] == "invalid_request_error"
    assert told.json()["type"] == "error"


async def test_unknown_paths_and_methods_are_told_as_such(world: GatewayWorld) -> None:
    client = world.http(await world.open())
    assert (await client.get("../v1/made_up")).json()["error"]["code"] == "not_found"
    wrong = await client.get("chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_the_model_is_listed_for_both_kinds_of_clients(world: GatewayWorld) -> None:
    opened = await world.open()
    models = await world.openai(opened).models.list()
    assert [model.id for model in models.data] == [world.run]
    assert (await world.openai(opened).models.retrieve(world.run)).id == world.run
    assert (await world.openai(opened).models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await world.openai(opened).models.retrieve("gpt-99")
    theirs = await world.anthropic(opened).models.list()
    assert [model.id for model in theirs.data] == [world.run]


async def test_a_probe_of_health_needs_no_key(world: GatewayWorld) -> None:
    anybody = world.http(await world.open(), "")
    healthy = await anybody.get("../health")
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert (await anybody.get("../v1/health")).status_code == 401
    asked = await anybody.head("../health/")
    assert (asked.status_code, asked.content) == (200, b"")


async def test_a_slash_at_the_end_of_a_path_changes_nothing(world: GatewayWorld) -> None:
    client = world.http(await world.open())
    answer = await client.post("chat/completions/", json=CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there."
