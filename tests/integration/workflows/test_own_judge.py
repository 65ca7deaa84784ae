"""A judge that is the run's own policy, through real agents, gateway and reward services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailrace_protos.base import as_int32
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeSettled
from tailrace_protos.trajectory import Trajectory
from tailrace_reward.__main__ import build
from tests.world.scripted_model import text_of
from tests.world.serving import eventually, eventually_async
from tests.world.workflows import WorkflowWorld, trained

REAL_REWARDS = True
MODULE = """
from openai import AsyncOpenAI

class Short:
    async def run(self, data, base_url, api_key, http_client):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": data["prompt"]}]
        await client.chat.completions.create(model="m", messages=messages)
        return 0.0
"""
PROMPT = "JUDGE {{ answer }} by {{ row.answer }}"


async def start(
    world: WorkflowWorld, user_module: Callable[[str, str], str], timeout_s: float = 30.0, **judge: Any
) -> None:
    user_module("own_judged", MODULE)
    await world.start("own_judged:Short")
    entry = {
        "name": "quality",
        "kind": "judge",
        "timeout_s": timeout_s,
        "judge": {"base_url": "gateway", "prompt": PROMPT, **judge},
    }
    path = world.gateway.experiment_file("reward", {"rewards": [entry]})
    await world.gateway.start_service(build, path, "reward-0")


def answers_and_judges(prompt: str, _request: object) -> str:
    return "Fine. Score: 7" if "JUDGE" in prompt else "Hello there."


async def one(world: WorkflowWorld) -> Trajectory:
    (played,) = (await world.play()).values()
    return played


async def failure(world: WorkflowWorld) -> EpisodeSettled:
    await world.admit()
    (settled,) = (await world.agents.settled(1)).values()
    assert settled.outcome is Outcome.INFRA_FAILURE
    return settled


async def no_sessions(world: WorkflowWorld) -> bool:
    return not await world.session_keys()


async def test_the_policy_judges_greedily_outside_of_the_episode(
    world: WorkflowWorld, user_module: Callable[[str, str], str]
) -> None:
    world.model.reply = answers_and_judges
    await start(world, user_module, max_tokens=40)
    played = await one(world)
    assert (played.reward, played.metrics["reward/quality"]) == (7.0, 7.0)
    asked, judged = world.model.requests
    assert "JUDGE Hello there. by " in text_of(as_int32(judged.prompt_ids))
    assert (judged.sampling.temperature, judged.max_new_tokens) == (0.0, 40)
    assert [trained(row) for row in played.rows] == [world.model._ids(asked)], "its tokens are no one's"
    assert played.metrics["num_calls"] == 1
    await eventually_async(lambda: no_sessions(world))
    await eventually(lambda: judged.episode_id in world.agents.scheduler.released)


async def test_a_greedy_reply_without_a_score_is_not_asked_for_again(
    world: WorkflowWorld, user_module: Callable[[str, str], str]
) -> None:
    await start(world, user_module, max_tokens=3)
    settled = await failure(world)
    assert "gave no score: no match of" in settled.reason
    assert settled.reason.endswith("in 'Hel'")
    assert len(world.model.requests) == 2


@pytest.mark.parametrize("limits", [{"timeout_s": 6.0}, {"attempt_timeout_s": 6.0, "max_attempts": 1}])
async def test_a_judge_that_hangs_ends_at_its_timeout_and_leaves_nothing(
    world: WorkflowWorld, user_module: Callable[[str, str], str], limits: dict[str, Any]
) -> None:
    def hold_the_next(_prompt: str, _request: object) -> str:
        world.model.hold = True
        return "Hello there."

    world.model.reply = hold_the_next
    await start(world, user_module, **limits)
    settled = await failure(world)
    assert "judge 'quality' (gateway) gave no score" in settled.reason
    await eventually(lambda: len(world.model.aborted) == 1)
    await eventually_async(lambda: no_sessions(world))
