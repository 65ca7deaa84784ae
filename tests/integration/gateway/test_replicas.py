"""Two replicas on one port: one is killed during an episode, and the episode continues."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import openai

from tailrace_protos.base import as_int32
from tests.world.gateway import GatewayWorld
from tests.world.servers import free_port
from tests.world.serving import eventually

NUM_TURNS = 8


class Half(NamedTuple):
    """Middle of an episode, where it waits."""

    reached: asyncio.Event
    go_on: asyncio.Event


async def episode(client: openai.AsyncOpenAI, half: Half) -> list[str]:
    """Play a conversation; wait in the middle."""
    messages = [{"role": "user", "content": "Turn 0"}]
    ids = []
    for turn in range(NUM_TURNS):
        if turn == NUM_TURNS // 2:
            half.reached.set()
            await half.go_on.wait()
        answer = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        ids.append(answer.id)
        said = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"Turn {turn + 1}"},
        ]
    return ids


async def test_episodes_go_on_when_one_of_two_replicas_is_killed(empty_world: GatewayWorld) -> None:
    world = empty_world
    port = free_port()
    replicas = [world.spawn_gateway(f"gateway-{index}", port) for index in range(2)]
    sessions = [await world.open(f"g{index}.0") for index in range(6)]
    assert {opened.base_url for opened in sessions} == {f"http://127.0.0.1:{port}/v1"}
    go_on = asyncio.Event()
    halves = [Half(asyncio.Event(), go_on) for _ in sessions]
    playing = [
        asyncio.create_task(episode(world.openai(opened), half))
        for opened, half in zip(sessions, halves, strict=True)
    ]
    await asyncio.gather(*(half.reached.wait() for half in halves))
    world.model.hold = True
    go_on.set()
    await eventually(lambda: world.model.num_held == len(sessions))
    replicas[0].kill()
    world.model.release()
    for opened, task in zip(sessions, playing, strict=True):
        ids = await asyncio.wait_for(task, 60.0)
        export = await world.export(opened.session_id, {completion_id: 1.0 for completion_id in ids})
        assert export.metrics["num_calls"] == NUM_TURNS
        assert export.metrics["num_forks"] == 0
        longest = max(export.rows, key=lambda row: len(row.token_ids))
        assert len(as_int32(longest.token_ids)) > 0
        assert len(export.rewards) == NUM_TURNS
