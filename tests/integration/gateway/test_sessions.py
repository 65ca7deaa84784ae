"""Sessions by HTTP and by NATS: opened, rewarded, exported, closed."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from tailrace.bus import CallFailedError
from tailrace.store import Blobs
from tailrace_gateway import handlers
from tailrace_protos.base import as_float32, as_int32, decode
from tailrace_protos.session import ExportStyle, SessionExport, SessionOpened
from tests.world.gateway import ADMIN_KEY, GatewayWorld
from tests.world.serving import eventually

USER = {"role": "user", "content": "Hi"}


async def test_a_session_lives_over_http_alone(world: GatewayWorld) -> None:
    admin = world.http(await world.open("probe"), ADMIN_KEY)
    made = await admin.post("sessions", json={"max_new_tokens": 50, "temperature": 0.25})
    assert made.status_code == 201
    opened = SessionOpened(**made.json())
    client, http = world.openai(opened), world.http(opened)
    answer = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert world.model.requests[0].max_new_tokens == 50
    assert world.model.requests[0].sampling.temperature == 0.25
    rewarded = await http.post("sessions/current/reward", json={"reward": 0.5})
    assert rewarded.json()["completion_id"] == answer.id
    exported = (await http.post("sessions/current/export", json={})).json()
    assert [row["reward"] for row in exported["rows"]] == [0.5]
    row = exported["rows"][0]
    assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["inference_logprobs"])
    assert sum(num_tokens for _, _, num_tokens in row["spans"]) == sum(row["loss_mask"]) > 0
    assert exported["messages"][-1]["content"] == "Hello there."
    assert (await http.delete("sessions/current")).json()["closed"]
    assert (await http.get("sessions/current")).status_code == 401


async def test_a_session_that_is_opened_again_keeps_its_log_and_gets_the_new_limits(
    world: GatewayWorld,
) -> None:
    admin = world.http(await world.open("probe"), ADMIN_KEY)

    async def open_for(timeout_s: float) -> SessionOpened:
        made = {"session_id": "one", "timeout_s": timeout_s}
        return SessionOpened(**(await admin.post("sessions", json=made)).json())

    opened = await open_for(60.0)
    client, http = world.openai(opened), world.http(opened)
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert await open_for(0.01) == opened
    refused = ""
    async with asyncio.timeout(60.0):
        while not refused:
            try:
                await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            except openai.APIStatusError as error:
                refused = str(error)
    assert "deadline" in refused
    assert await open_for(60.0) == opened
    before = (await http.get("sessions/current")).json()
    assert before["deadline_unix_s"] > time.time() + 30
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    after = (await http.get("sessions/current")).json()
    assert after["num_sampled_tokens"] > before["num_sampled_tokens"] > 0, "its log was kept"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("sessions", {"session_id": "a b"}, 400, "session_id"),
        ("sessions", {"max_new_tokens": 0}, 400, "max_new_tokens"),
        ("sessions", {"made_up": 1}, 400, "made_up"),
        ("sessions", {"stop": ["END", ""]}, 400, "stop"),
        ("sessions/g0.0/reward", {"reward": 1.0}, 404, None),
        ("sessions/g0.0/reward", {"reward": 1.0, "completion_id": "x"}, 404, None),
        ("sessions/g0.0/reward", {}, 400, "reward"),
        ("sessions/g0.0/export", {"export_style": "poem"}, 400, "export_style"),
        ("sessions/g0.0/export", {"turn_discount": 1e200}, 400, "turn_discount"),
        ("sessions/g0.0/export", {"rewards": {"": 1e300}}, 400, "reward"),
        ("sessions/nobody/export", {}, 404, None),
    ],
)
async def test_what_is_wrong_with_a_session_is_told(
    world: GatewayWorld, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    admin = world.http(await world.open(), ADMIN_KEY)
    answer = await admin.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_a_reward_without_an_id_is_that_of_the_newest_answer(world: GatewayWorld) -> None:
    session = world.http(await world.open())
    answer = await session.post("chat/completions", json={"messages": [USER], "n": 3})
    rewarded = await session.post("sessions/current/reward", json={"reward": 1.0})
    assert rewarded.json()["completion_id"] == answer.json()["id"]


async def test_an_export_knows_nothing_of_the_episodes_reward_in_an_earlier_one(
    world: GatewayWorld,
) -> None:
    client = world.openai(await world.open())
    first = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    await world.export(rewards={"": 5.0})
    rows = (await world.export(rewards={first.id: 1.0})).rows
    assert [(row.reward, row.has_reward) for row in rows] == [(1.0, True), (0.0, False)]


async def test_an_export_of_which_one_reward_is_wrong_sets_none(world: GatewayWorld) -> None:
    session = world.http(await world.open())
    calls = [await session.post("chat/completions", json={"messages": [USER]}) for _ in range(2)]
    first, second = (call.json()["id"] for call in calls)
    admin = world.http(await world.open("other"), ADMIN_KEY)
    for rewards, status in (({first: 1.0, "nobody": 1.0}, 404), ({second: 2.0}, 200)):
        answer = await admin.post("sessions/g0.0/export", json={"rewards": rewards})
        assert answer.status_code == status
    assert [row["reward"] for row in answer.json()["rows"]] == [0.0, 2.0]


async def test_rewards_follow_the_conversation_as_the_export_asks(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    first = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    more = [USER, {"role": "assistant", "content": "Hello there."}, USER]
    second = await client.chat.completions.create(model="m", messages=more)  # type: ignore[arg-type]
    rewards = {first.id: 1.0, second.id: 2.0}
    rows = (await world.export(rewards=rewards, turn_discount=0.5)).rows
    assert [row.reward for row in rows] == [2.0, 2.0]
    whole = await world.export(rewards=rewards, style=ExportStyle.CONCAT)
    assert len(whole.rows) == 1
    assert as_float32(whole.rows[0].turn_rewards).tolist() == [1.0, 2.0]
    assert len(as_int32(whole.rows[0].turn_ends)) == 2
    assert whole.rewards == (1.0, 2.0)


async def test_a_reward_after_the_export_is_told_that_the_session_is_over(world: GatewayWorld) -> None:
    opened = await world.open()
    client, http = world.openai(opened), world.http(opened)
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert (await http.post("sessions/current/export", json={"rewards": {"": 1.0}})).status_code == 200
    late = await http.post("sessions/current/reward", json={"reward": 2.0})
    assert (late.status_code, late.json()["error"]["code"]) == (410, "session_closed")


@pytest.mark.parametrize(("granularity", "turns"), [("trajectory", [2]), ("step", [1, 1])])
async def test_rows_over_http_are_what_the_run_makes_of_episodes_unless_the_export_says_it(
    empty_world: GatewayWorld, granularity: str, turns: list[int]
) -> None:
    world = empty_world
    world.run_settings["granularity"] = granularity
    await world.start_gateway()
    opened = await world.open()
    client, http = world.openai(opened), world.http(opened)
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    more = [USER, {"role": "assistant", "content": "Hello there."}, USER]
    await client.chat.completions.create(model="m", messages=more)  # type: ignore[arg-type]
    rewards = {"rewards": {"": 1.0}}
    for said, wanted in (({}, turns), ({"export_style": "concat"}, [2])):
        exported = (await http.post("sessions/current/export", json={**rewards, **said})).json()
        assert [len(row["turn_ends"]) for row in exported["rows"]] == wanted


async def test_much_is_exported_by_claim_check(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "MAX_INLINE_BYTES", 200)
    client = world.openai(await world.open())
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    export = await world.export(rewards={"": 1.0})
    assert export.rows == ()
    whole = decode(await Blobs(world.redis, world.run).get(export.blob), SessionExport)
    assert [row.reward for row in whole.rows] == [1.0]


async def test_leases_of_sessions_are_given_back(world: GatewayWorld) -> None:
    client = world.openai(await world.open())
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert [request.episode_ids for request in world.scheduler.requests] == [("g0.0",)]
    await world.close()
    await eventually(lambda: "g0.0" in world.scheduler.released)
    await eventually(lambda: any(a.worker_id == "gateway-0" for a in world.scheduler.activities))


async def test_a_late_close_leaves_the_next_session_of_its_episode_alone(world: GatewayWorld) -> None:
    first = await world.open()
    await world.close()
    second = await world.open()
    await world.close(api_key=first.api_key)
    answer = await world.http(second).post("chat/completions", json={"messages": [USER]})
    assert answer.status_code == 200
    await world.close(api_key=second.api_key)
    answer = await world.http(second).post("chat/completions", json={"messages": [USER]})
    assert answer.status_code == 401


async def test_a_restarted_gateway_knows_its_sessions(world: GatewayWorld) -> None:
    opened = await world.open()
    await world.http(opened).post("chat/completions", json={"messages": [USER]})
    other = await world.start_gateway("gateway-1")
    urls = {opened.base_url}
    deadline = time.monotonic() + 60
    while len(urls) < 2 and time.monotonic() < deadline:
        opened = await world.open()
        urls.add(opened.base_url)
    assert other.instance_id == "gateway-1"
    for url in urls:
        there = SessionOpened(opened.session_id, url, opened.api_key)
        shown = (await world.http(there).get("sessions/current")).json()
        assert shown["metrics"]["num_calls"] == 1


@pytest.mark.parametrize("seed", [10**40, -(10**20), 1 << 63])
async def test_a_seed_beyond_64_bits_is_refused_by_name(world: GatewayWorld, seed: int) -> None:
    client = world.http(await world.open(), ADMIN_KEY)
    refused = await client.post("sessions", json={"sampling_seed": seed})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "sampling_seed"


async def test_the_key_of_an_earlier_session_exports_nothing_of_the_new_one(
    world: GatewayWorld,
) -> None:
    earlier = await world.open()
    await world.close(api_key=earlier.api_key)
    client = world.http(await world.open())
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await client.post("chat/completions", json=body)).status_code == 200
    with pytest.raises(CallFailedError, match="there is no session"):
        await world.export(api_key=earlier.api_key)
    assert (await client.post("chat/completions", json=body)).status_code == 200
    assert (await world.export()).metrics["num_calls"] == 2
