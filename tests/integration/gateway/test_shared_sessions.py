"""One session in two replicas: each uses its memory, and reads the log if other entries can matter."""

from __future__ import annotations

from pathlib import Path

import httpx2

from tests.integration.gateway.replicas import stop, two_replicas, with_own_redis
from tests.world.gateway import GatewayWorld


async def say(client: httpx2.AsyncClient, messages: list[dict[str, str]]) -> str:
    answer = await client.post("chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_a_conversation_that_changes_replicas_with_every_turn_never_forks(
    world: GatewayWorld,
) -> None:
    clients = await two_replicas(world, await world.open())
    messages: list[dict[str, str]] = []
    for turn in range(6):
        world.model.reply = lambda prompt, request, turn=turn: f"Reply {turn}."
        messages.append({"role": "user", "content": f"Turn {turn}"})
        messages.append({"role": "assistant", "content": await say(clients[turn % 2], messages)})
    prompts = [world.model.prompt(turn) for turn in range(6)]
    for turn in range(1, 6):
        assert prompts[turn].startswith(prompts[turn - 1] + f"Reply {turn - 1}.")
    metrics = (await world.export()).metrics
    assert metrics["num_calls"] == 6
    assert metrics["num_forks"] == 0


async def test_a_response_continues_one_of_the_other_replica(world: GatewayWorld) -> None:
    first, other = await two_replicas(world, await world.open())
    await say(other, [{"role": "user", "content": "Both know the session."}])
    begun = (await first.post("responses", json={"input": "One"})).json()
    body = {"input": "Two", "previous_response_id": begun["id"]}
    assert (await other.post("responses", json=body)).status_code == 200
    assert "One" in world.model.prompt()
    assert (await world.export()).metrics["num_forks"] == 0


async def test_tokens_sampled_by_the_other_replica_count_once_this_one_noticed(
    world: GatewayWorld,
) -> None:
    first, other = await two_replicas(world, await world.open(max_new_tokens=1000))
    for number, client in enumerate((first, other, first, first)):
        await say(client, [{"role": "user", "content": f"Question {number}"}])
    left = [request.max_new_tokens for request in world.model.requests]
    each = left[0] - left[1]
    assert each > 0
    assert left[3] == 1000 - 3 * each


async def test_a_session_opened_here_is_served_while_the_store_is_away(
    empty_world: GatewayWorld, tmp_path: Path
) -> None:
    world = empty_world
    own = await with_own_redis(world, tmp_path)
    await world.start_gateway(store_timeout_s=2.0)  # the client's second try would not be opened here
    client = world.http(await world.open())
    stop(own, world)
    assert await say(client, [{"role": "user", "content": "Hi"}]) == "Hello there."


async def test_a_session_unknown_here_waits_for_the_store_with_503(
    empty_world: GatewayWorld, tmp_path: Path
) -> None:
    world = empty_world
    own = await with_own_redis(world, tmp_path)
    await world.start_gateway(store_timeout_s=2.0)
    world.settings["store_timeout_s"] = 2.0
    _, other = await two_replicas(world, await world.open())
    stop(own, world)
    refused = await other.post(
        "chat/completions", json={"messages": [{"role": "user", "content": "?"}]}
    )
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
