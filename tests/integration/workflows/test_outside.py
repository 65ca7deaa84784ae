"""Episodes that outside agents lease, play and reward over HTTP: settled once, whoever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import GIVEN_VERSION
from tailrace_protos.session import SessionOpened
from tests.integration.gateway.replicas import other_url
from tests.world.byte_model import call_text, renderer
from tests.world.gateway import ADMIN_KEY
from tests.world.serving import eventually
from tests.world.workflows import WorkflowWorld, trained

USER = {"role": "user", "content": "Hi"}
OUTSIDE = {"mode": "outside"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"


class Desk:
    """An agent's view: one client with the admin key, one with the key of its episode."""

    def __init__(self, world: WorkflowWorld, admin: httpx2.AsyncClient) -> None:
        self.world = world
        self.admin = admin

    async def lease(self, **body: Any) -> dict[str, Any]:
        """Lease an episode that is about to be offered, perhaps by a process that has yet to start."""
        async with asyncio.timeout(120.0):
            answer = await self.admin.post("episodes", json={"wait_s": 10, **body})
            while answer.status_code == 204:
                answer = await self.admin.post("episodes", json={"wait_s": 10, **body})
        assert answer.status_code == 200, answer.text
        leased: dict[str, Any] = answer.json()
        return leased

    def player(self, leased: dict[str, Any]) -> httpx2.AsyncClient:
        opened = SessionOpened(leased["episode_id"], leased["base_url"], leased["api_key"])
        return self.world.gateway.http(opened)

    async def play(self, leased: dict[str, Any]) -> httpx2.AsyncClient:
        """Make one call with the key of an episode."""
        player = self.player(leased)
        answer = await player.post("chat/completions", json={"messages": [USER]})
        assert answer.status_code == 200, answer.text
        return player


async def start(world: WorkflowWorld, **workflow: Any) -> Desk:
    await world.start("", **OUTSIDE, **workflow)
    return Desk(world, world.gateway.http(await world.gateway.open("probe"), ADMIN_KEY))


async def start_gateway(world: WorkflowWorld, instance_id: str) -> SessionOpened:
    await world.gateway.start_gateway(instance_id)
    return await world.gateway.open("probe")


async def ask(player: httpx2.AsyncClient) -> httpx2.Response:
    return await player.post("chat/completions", json={"messages": [USER]})


async def end(player: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await player.post("episodes/current/reward", json=body)


async def test_a_leased_episode_settles_with_its_reward_into_its_group(world: WorkflowWorld) -> None:
    desk = await start(world)
    await world.admit(group_size=2)
    for reward in (1.0, 0.25):
        leased = await desk.lease()
        assert leased["task"]["prompt"] in ("Say hello.", "Say more.")
        assert (leased["tag"], leased["phase"], leased["is_resumed"]) == ("rows", "train", False)
        player = await desk.play(leased)
        ended = await end(player, reward=reward, metrics={"success": reward})
        assert ended.json()["state"] == "rewarded"
    assert (await desk.admin.post("episodes", json={})).status_code == 204
    played = await world.agents.trajectories(1)
    assert sorted(one.reward for one in played.values()) == [0.25, 1.0]
    assert {one.outcome for one in played.values()} == {Outcome.OK}
    assert sorted(one.metrics["success"] for one in played.values()) == [0.25, 1.0]
    assert [trained(row) for one in played.values() for row in one.rows] == world.sampled()


async def test_a_repeated_reward_changes_nothing_and_another_one_is_refused(
    world: WorkflowWorld,
) -> None:
    desk = await start(world)
    await world.admit()
    leased = await desk.lease()
    player = await desk.play(leased)
    assert not (await end(player, reward=1.0)).json()["is_repeated"]
    await world.agents.settled(1)
    for _ in range(2):  # before and after the episode's session is deleted
        again = await end(player, reward=1.0)
        assert (again.status_code, again.json()["is_repeated"]) == (200, True)
        other = await end(player, reward=0.5)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "already_rewarded")
        async with asyncio.timeout(60):
            while [key for key in await world.session_keys() if leased["episode_id"].encode() in key]:
                await asyncio.sleep(0.02)
    assert (await player.get("episodes/current")).json()["state"] == "over"
    assert (await player.get("episodes/current")).json()["outcome"] == "ok"
    assert (await player.post("chat/completions", json={"messages": [USER]})).status_code == 401


@pytest.mark.parametrize("is_own", [False, True])
async def test_calls_after_the_reward_are_refused_and_take_no_part_in_it(
    world: WorkflowWorld, is_own: bool
) -> None:
    opened = [await start_gateway(world, replica) for replica in ("gateway-0", "gateway-1")]
    settings = world.settings("", **OUTSIDE, reward_scope="last")
    worker = world.agents.spawn_agents("w0", **settings)
    desk = Desk(world, world.gateway.http(opened[0], ADMIN_KEY))
    await world.admit()
    leased = await desk.lease(agent="a")
    player = await desk.play(leased)
    there = await other_url(world.gateway, leased["base_url"])
    elsewhere = await desk.play({**leased, "base_url": there})
    worker.kill()  # nobody takes the reward for a while
    world.model.hold = True
    late = asyncio.create_task(ask(player))
    await eventually(lambda: world.model.num_held == 1)
    one = f"episodes/{leased['episode_id']}/reward"
    rewarder = player if is_own else desk.admin
    assert (await rewarder.post(one, json={"reward": 1.0})).status_code == 200
    assert (await late).status_code == 410
    world.model.release()
    for client in (player, elsewhere):
        async with asyncio.timeout(60):
            while (refused := await ask(client)).status_code == 200:  # the other replica is told soon
                pass
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_closed")
    await world.gateway.open(leased["episode_id"])  # as a worker does that finds it leased
    await world.agents.start_agents("w1", **settings)
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.metrics["num_calls"]) == (Outcome.OK, 2)
    assert [row.reward for row in played.rows] == [0.0, 1.0]


async def test_keys_ids_and_bodies_that_are_wrong_are_told(world: WorkflowWorld) -> None:
    desk = await start(world)
    await world.admit(num_groups=2)
    leased, other = await desk.lease(), await desk.lease()
    player = desk.player(leased)
    one = f"episodes/{leased['episode_id']}"
    assert (await player.post("episodes", json={})).status_code == 403
    assert (await player.get(f"episodes/{other['episode_id']}")).status_code == 403
    assert (await desk.admin.get("episodes/nobody")).status_code == 404
    assert (await desk.admin.post("episodes/nobody/reward", json={"reward": 1})).status_code == 404
    stranger = desk.player({**leased, "api_key": "tr-wrong"})
    assert (await stranger.get(one)).status_code == 401
    assert (await end(player, reward=1.0)).json()["error"]["code"] == "no_calls"
    await desk.play(leased)
    for body, param in (
        ({}, "reward"),
        ({"reward": "x"}, "reward"),
        ({"reward": 1e13}, "reward"),
        ({"outcome": "great", "reward": 1}, "outcome"),
        ({"outcome": "infra_failure", "reward": 1}, "reward"),
        ({"made_up": 1}, "made_up"),
    ):
        refused = await player.post(f"{one}/reward", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await end(player, rewards={"nobody": 1.0})).status_code == 404
    assert (await desk.admin.post("episodes", json={"agent": "a b"})).status_code == 400
    assert (await desk.admin.post("episodes", json={"wait_s": 600})).status_code == 400


async def test_an_agent_that_restarts_gets_its_episode_again_from_its_start(
    world: WorkflowWorld,
) -> None:
    desk = await start(world)
    await world.admit()
    first = await desk.lease(agent="a/0")
    assert await desk.lease(agent="a/0") == {**first, "is_resumed": True}  # its answer was lost
    died = await desk.play(first)
    again = await desk.lease(agent="a/0")
    assert (again["episode_id"], again["is_resumed"]) == (first["episode_id"], True)
    assert again["api_key"] != first["api_key"]
    assert (await end(died, reward=9.0)).status_code == 401
    player = await desk.play(again)
    kept = await desk.lease(agent="a/0", keep_session=True)
    assert kept["api_key"] == again["api_key"]
    await end(player, reward=1.0)
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.reward, played.metrics["num_calls"]) == (1.0, 1)


async def test_an_agent_without_a_sign_of_life_loses_its_episode(world: WorkflowWorld) -> None:
    desk = await start(world, lease_s=3.0)
    await world.admit()
    first = await desk.lease(agent="a")
    died = await desk.play(first)
    second = await desk.lease(agent="b")
    assert (second["episode_id"], second["is_resumed"]) == (first["episode_id"], False)
    assert (await end(died, reward=9.0)).status_code == 401
    assert (await died.post("chat/completions", json={"messages": [USER]})).status_code == 401
    player = await desk.play(second)
    assert (await player.post("episodes/current/renew")).status_code == 200
    await end(player, reward=1.0)
    assert (await player.post("episodes/current/renew")).status_code == 409
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.reward, played.metrics["num_calls"]) == (1.0, 1)


async def test_a_dead_worker_and_a_dead_gateway_leave_the_agents_episode_alone(
    world: WorkflowWorld,
) -> None:
    await world.gateway.start_gateway()
    settings = world.settings("", **OUTSIDE)
    worker = world.agents.spawn_agents("w0", **settings)
    gateway_0 = await world.gateway.open("probe")
    desk = Desk(world, world.gateway.http(gateway_0, ADMIN_KEY))
    await world.admit(group_size=2)
    leased = [await desk.lease(agent=f"a/{slot}") for slot in range(2)]
    players = [await desk.play(one) for one in leased]
    worker.kill()
    assert (await end(players[0], reward=0.5)).status_code == 200  # nobody waits for it now
    await world.gateway.start_gateway("gateway-1")
    await world.agents.start_agents("w1", **settings)
    there = await other_url(world.gateway, gateway_0.base_url)
    moved = desk.player({**leased[1], "base_url": there})
    more = [USER, {"role": "assistant", "content": "Hello there."}, USER]
    assert (await moved.post("chat/completions", json={"messages": more})).status_code == 200
    assert (await end(moved, reward=1.0)).status_code == 200
    played = await world.agents.trajectories(1)
    assert sorted(one.reward for one in played.values()) == [0.5, 1.0]
    assert sorted(one.metrics["num_calls"] for one in played.values()) == [1, 2]


async def test_an_agent_that_outlives_a_stop_goes_on_after_its_old_deadline(
    world: WorkflowWorld,
) -> None:
    for replica in ("gateway-0", "gateway-1"):
        await world.gateway.start_gateway(replica)
    opened = await world.gateway.open("probe")
    urls = (opened.base_url, await other_url(world.gateway, opened.base_url))
    settings = world.settings("", **OUTSIDE, timeout_s=10.0, lease_s=4.0)
    worker = world.agents.spawn_agents("w0", **settings)
    desk = Desk(world, world.gateway.http(opened, ADMIN_KEY))
    await world.admit(timeout_s=600.0)
    leased = await desk.lease(agent="a")
    players = [await desk.play({**leased, "base_url": url}) for url in urls]
    await desk.lease(agent="a", keep_session=True)  # its calls are seen: they prolong nothing
    worker.kill()
    await eventually(lambda: time.time() > leased["deadline_unix_s"])

    async def answers() -> set[int]:
        calls = [one.post("chat/completions", json={"messages": [USER]}) for one in players]
        return {answer.status_code for answer in await asyncio.gather(*calls)}

    assert await answers() == {410}
    settings = world.settings("", **OUTSIDE, timeout_s=600.0, lease_s=600.0)
    await world.agents.start_agents("w1", **settings)
    session = f"sessions/{leased['episode_id']}"
    async with asyncio.timeout(60.0):
        while (await desk.admin.get(session)).json()["deadline_unix_s"] < time.time() + 300.0:
            await asyncio.sleep(0.05)
    assert (await desk.admin.post("episodes", json={"agent": "b"})).status_code == 204
    assert await answers() == {200}
    assert (await end(players[0], reward=1.0)).status_code == 200
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.reward) == (Outcome.OK, 1.0)
    assert played.metrics["num_calls"] == 4


async def test_a_draining_worker_leaves_its_offers_to_the_next_one(world: WorkflowWorld) -> None:
    await world.gateway.start_gateway()
    settings = world.settings("", **OUTSIDE)
    worker = world.agents.spawn_agents("w0", **settings)
    desk = Desk(world, world.gateway.http(await world.gateway.open("probe"), ADMIN_KEY))
    await world.admit()
    player = await desk.play(await desk.lease(agent="a"))
    assert await asyncio.to_thread(worker.stop) == 0
    await world.agents.start_agents("w1", **settings)
    await end(player, reward=1.0)
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.reward, played.metrics["num_calls"]) == (1.0, 1)


@pytest.mark.parametrize("limits", [{"timeout_s": 8.0}, {"group_timeout_s": 8.0}])
async def test_an_episode_that_nobody_ends_times_out_and_a_late_reward_is_told(
    world: WorkflowWorld, limits: dict[str, float]
) -> None:
    group_timeout_s = limits.pop("group_timeout_s", 60.0)
    desk = await start(world, **limits)
    await world.admit(timeout_s=group_timeout_s)
    leased = await desk.lease(agent="a")
    player = await desk.play(leased)
    again = await desk.lease(agent="a", keep_session=True)
    assert again["deadline_unix_s"] == leased["deadline_unix_s"], "it counts from the first lease"
    (settled,) = (await world.agents.settled(1)).values()
    assert settled.outcome is Outcome.TIMEOUT
    assert settled.reason == "no agent ended the episode within 8 s"
    late = await end(player, reward=1.0)
    assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_over")
    assert "timeout" in late.json()["error"]["message"]
    assert (await desk.admin.post("episodes", json={})).status_code == 204


async def test_an_agent_that_goes_silent_without_tokens_has_failed_as_a_policy(
    world: WorkflowWorld,
) -> None:
    world.model.reply = lambda *_: "word " * 2_000
    desk = await start(world, timeout_s=10.0)
    await world.admit()
    player = desk.player(await desk.lease())
    while (answer := await ask(player)).status_code == 200:
        pass
    assert answer.json()["error"]["code"] in ("token_budget_exceeded", "context_length_exceeded")
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.reward) == (Outcome.POLICY_FAILURE, 0.0)
    assert "no agent ended the episode within 10 s" in played.reason
    assert played.metrics["over_budget"] == 1.0
    assert played.rows
    late = await end(player, reward=1.0)
    assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_over")
    assert "policy_failure" in late.json()["error"]["message"]


def waiting_groups(world: WorkflowWorld) -> tuple[str, ...]:
    """Groups that the newest report of the agents worker names."""
    reports = [one for one in world.agents.scheduler.activities if one.worker_id == "w0"]
    return reports[-1].waiting_groups if reports else ()


async def test_an_agent_that_comes_after_the_groups_timeout_has_all_its_time(
    world: WorkflowWorld,
) -> None:
    desk = await start(world)
    (task,) = await world.admit(deadline_s=-1.0, timeout_s=30.0)
    await eventually(lambda: waiting_groups(world) == (task.group_id,))
    leased = await desk.lease()
    assert leased["deadline_unix_s"] == pytest.approx(time.time() + 30.0, abs=10.0)
    await eventually(lambda: not waiting_groups(world))
    await end(await desk.play(leased), reward=1.0)
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.reward) == (Outcome.OK, 1.0)


async def test_a_group_that_the_scheduler_closes_is_no_longer_leased(world: WorkflowWorld) -> None:
    desk = await start(world)
    (task,) = await world.admit()
    await eventually(lambda: waiting_groups(world) == (task.group_id,))
    await world.agents.buffer.cancel_members(task.group_id, [0], Outcome.CANCELLED, "over")
    await eventually(lambda: not waiting_groups(world))
    assert (await desk.admin.post("episodes", json={})).status_code == 204


async def test_an_agents_failures_are_outcomes(world: WorkflowWorld) -> None:
    desk = await start(world)
    await world.admit(num_groups=2)
    await end(desk.player(await desk.lease()), outcome="infra_failure", reason="my disk is full")
    await end(await desk.play(await desk.lease()), outcome="policy_failure", reason="it gave up")
    settled = (await world.agents.settled(2)).values()
    outcomes = {Outcome.INFRA_FAILURE, Outcome.POLICY_FAILURE}
    assert {one.outcome for one in settled} == outcomes


@pytest.mark.parametrize("program", [(sys.executable, "agent.py"), ("node", "agent.mjs")])
async def test_the_examples_play_with_their_calculator(
    world: WorkflowWorld, program: tuple[str, str]
) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"no {program[0]} on this machine")
    world.model.reply = lambda prompt, _: (
        "42" if "<tool_response>42" in prompt else call_text("calculator", expression="6*7")
    )
    await world.gateway.start_gateway()
    rows = [{"prompt": "What is 6 times 7?", "answer": "42"}]
    await world.agents.start_agents(**world.settings("", rows, **OUTSIDE))
    url = (await world.gateway.open("probe")).base_url
    argv = (program[0], str(EXAMPLE / program[1]), url)
    variables = {**os.environ, "TAILRACE_GATEWAY_ADMIN_KEY": ADMIN_KEY}
    agent = await asyncio.create_subprocess_exec(*argv, env=variables)
    await world.admit(num_groups=2, group_size=2)
    played = await world.agents.trajectories(2)
    agent.kill()
    await agent.wait()
    assert [one.reward for one in played.values()] == [1.0] * 4
    assert [one.metrics["num_tool_calls"] for one in played.values()] == [1] * 4
    assert [one.metrics["num_forks"] for one in played.values()] == [0] * 4


NO_SPANS: dict[str, Any] = {"spans": None, "inference_logprobs": None}


async def test_rows_of_tokens_are_settled_as_they_are(world: WorkflowWorld) -> None:
    desk = await start(world)
    await world.admit()
    leased = await desk.lease()
    row = {
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [0, 1, 1, 0, 1],
        "inference_logprobs": [None, -0.5, -0.25, None, -1],
        "spans": [[3, "elsewhere", 2], [4, "elsewhere", 1]],
    }
    player = desk.player(leased)
    for wrong, param in (
        ({"loss_mask": [0, 1]}, "rows[0].loss_mask"),
        ({"loss_mask": [0] * 5}, "rows[0].loss_mask"),
        ({"inference_logprobs": [0.5] * 5}, "rows[0].inference_logprobs"),
        ({"spans": [[3, "", 2]]}, "rows[0].spans"),
        ({"messages": []}, "rows[0]"),
        ({"token_ids": [-1] * 5}, "rows[0].token_ids"),
        ({"token_ids": [5, 6, 7, 8, 1_000_000]}, "rows[0].token_ids"),
        ({"spans": [[3, "", 4], [3, "", -1]]}, "rows[0].spans[1][2]"),
        ({"spans": [[-5, "", 3]]}, "rows[0].spans[0][0]"),
        ({"spans": [[2**60, "", 3]]}, "rows[0].spans[0][0]"),
        ({"inference_logprobs": None}, "rows[0].inference_logprobs"),
        ({"inference_logprobs": [None, -1e300, -0.25, None, -1]}, "rows[0].inference_logprobs"),
        ({"loss_mask": [1, 0, 0, 0, 0], **NO_SPANS}, "rows[0].loss_mask"),
        ({"reward": 1e300}, "rows[0].reward"),
        ({"turn_rewards": [0, -1e13]}, "rows.turn_rewards"),
        ({"turn_returns": [1.0]}, "rows[0].turn_returns"),
        ({"token_ids": [5] * 99_999, "loss_mask": [1] * 99_999, **NO_SPANS}, "rows[0]"),
    ):
        body = {"rows": [{**row, **wrong}], "reward": 1.0}
        refused = await player.post("episodes/current/trajectory", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    failed = {"rows": [row], "reward": 1.0, "outcome": "timeout"}
    refused = await player.post("episodes/current/trajectory", json=failed)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "outcome")
    body = {"rows": [row], "reward": 0.75}
    assert (await player.post("episodes/current/trajectory", json=body)).status_code == 200
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.reward) == (Outcome.OK, 0.75)
    (kept,) = played.rows
    assert as_int32(kept.token_ids).tolist() == row["token_ids"]
    assert as_float32(kept.inference_logprobs).tolist() == [0, -0.5, -0.25, 0, -1]
    assert as_int32(kept.turn_ends).tolist() == [3, 5]
    assert as_float32(kept.turn_rewards).tolist() == [0, 0.75]
    assert [(span.policy_version, span.num_tokens) for span in kept.spans] == [(3, 2), (4, 1)]


async def test_rows_of_an_export_are_settled_as_they_were_exported(world: WorkflowWorld) -> None:
    """A conversation without a reward stays without one."""
    desk = await start(world)
    await world.admit()
    player = await desk.play(await desk.lease())
    first = (await ask(player)).json()["id"]
    body: dict[str, Any] = {"rewards": {first: 2.0}, "export_style": "concat"}
    exported = (await player.post("sessions/current/export", json=body)).json()["rows"]
    assert [row["has_reward"] for row in exported] == [False, True]
    body = {"rows": exported, "reward": 2.0}
    assert (await player.post("episodes/current/trajectory", json=body)).status_code == 200
    (played,) = (await world.agents.trajectories(1)).values()
    assert [(row.conversation, row.has_reward, row.reward) for row in played.rows] == [
        (0, False, 0.0),
        (1, True, 2.0),
    ]
    returns = [as_float32(row.turn_returns).tolist() for row in played.rows]
    assert returns == [row["turn_returns"] for row in exported] == [[0.0], [2.0]]


async def test_a_conversation_as_text_trains_the_messages_with_a_weight(world: WorkflowWorld) -> None:
    desk = await start(world)
    await world.admit()
    messages = [
        USER,
        {"role": "assistant", "content": "First.", "weight": 0},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Second.", "weight": 1},
    ]
    player = desk.player(await desk.lease())
    body: dict[str, Any] = {"rows": [{"messages": messages}], "reward": 1.0}
    assert (await player.post("episodes/current/trajectory", json=body)).status_code == 200
    (played,) = (await world.agents.trajectories(1)).values()
    (row,) = played.rows
    ids = np.array(trained(row), np.int32)
    assert (renderer().decode(ids), ids[-1]) == ("Second.", renderer().end_of_turn_id)
    assert np.isnan(as_float32(row.inference_logprobs)[as_uint8(row.loss_mask) == 1]).all()
    assert [span.policy_version for span in row.spans] == [GIVEN_VERSION]
    assert played.reward == 1.0


async def test_a_model_call_in_flight_keeps_the_lease_however_long_it_takes(
    world: WorkflowWorld,
) -> None:
    desk = await start(world, lease_s=3.0)
    await world.admit()
    leased = await desk.lease(agent="a")
    world.model.hold = True
    playing = asyncio.create_task(desk.play(leased))
    await eventually(lambda: world.model.num_held == 1)
    assert (await desk.admin.post("episodes", json={"agent": "b", "wait_s": 7})).status_code == 204
    world.model.release()
    assert (await end(await playing, reward=1.0)).status_code == 200
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.reward, played.metrics["num_calls"]) == (1.0, 1)


async def test_a_reward_outlives_a_worker_that_dies_before_it_has_settled_it(
    world: WorkflowWorld,
) -> None:
    await world.gateway.start_gateway()
    settings, rewards = world.settings("", **OUTSIDE), world.agents.rewards
    worker = world.agents.spawn_agents("w0", **settings)
    desk = Desk(world, world.gateway.http(await world.gateway.open("probe"), ADMIN_KEY))
    await world.admit()
    rewards.free.clear()
    player = await desk.play(await desk.lease(agent="a"))
    assert (await end(player, reward=1.0)).status_code == 200
    await eventually(lambda: len(rewards.requests) == 1)
    worker.kill()
    rewards.free.set()
    await world.agents.start_agents("w1", **settings)
    (played,) = (await world.agents.trajectories(1)).values()
    assert (played.outcome, played.reward) == (Outcome.OK, 1.0)
    assert played.metrics["num_calls"] == 1
    again = await end(player, reward=1.0)
    assert (again.status_code, again.json()["is_repeated"]) == (200, True)
