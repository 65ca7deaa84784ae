"""Episodes that a user's agent plays through a real gateway: rows, rewards, ends, and nothing left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from tailrace_protos.base import as_float32, as_int64
from tailrace_protos.episode import OVER_BUDGET, Outcome
from tests.world.serving import eventually
from tests.world.workflows import WorkflowWorld, trained

MODULE = '''
import asyncio
from openai import AsyncOpenAI

class Base:
    async def run(self, data, base_url, api_key, http_client):
        self_client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        return await self.talk(self_client, data)

    async def ask(self, client, messages):
        return await client.chat.completions.create(model="m", messages=messages)

class Short(Base):
    """One call; rewards an answer."""
    async def talk(self, client, data):
        answer = await self.ask(client, [{"role": "user", "content": data["prompt"]}])
        return float(answer.choices[0].message.content == "Hello there.")

class Twice(Base):
    """Two turns of one conversation, rewarded one by one."""
    async def talk(self, client, data):
        messages = [{"role": "user", "content": data["prompt"]}]
        first = await self.ask(client, messages)
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        second = await self.ask(client, messages)
        return {first.id: 1.0, second.id: 0.5}

class Invents(Base):
    async def talk(self, client, data):
        await self.ask(client, [{"role": "user", "content": data["prompt"]}])
        return {"chatcmpl-of-somebody-else": 1.0}

class Mute(Base):
    async def talk(self, client, data):
        return 1.0

class Raises(Base):
    async def talk(self, client, data):
        await self.ask(client, [{"role": "user", "content": data["prompt"]}])
        raise KeyError("answer")

class Endless(Base):
    """Asks until the gateway refuses."""
    async def talk(self, client, data):
        messages = [{"role": "user", "content": data["prompt"]}]
        while True:
            answer = await self.ask(client, messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]

class Team(Base):
    """A plan, a helper with two calls, and an end; one step is tried in another way first."""
    async def talk(self, client, data):
        plan = [{"role": "user", "content": "Plan."}]
        plan += [await self.say(client, plan)]
        helper = [{"role": "user", "content": "Help."}]
        helper += [await self.say(client, helper), {"role": "user", "content": "Go on."}]
        await self.say(client, helper)
        await self.say(client, plan + [{"role": "user", "content": "Try."}])
        await self.say(client, plan + [{"role": "user", "content": "End."}])
        return 1.0

    async def say(self, client, messages):
        answer = await self.ask(client, messages)
        return answer.choices[0].message.model_dump(exclude_none=True)

class Hides(Endless):
    """A framework that reports the gateway's refusal in its own words."""
    async def talk(self, client, data):
        try:
            await super().talk(client, data)
        except Exception:
            raise RuntimeError("the agent could not go on") from None

class Swallows(Endless):
    """A framework that returns nothing when a call fails."""
    async def talk(self, client, data):
        try:
            await super().talk(client, data)
        except Exception:
            return None

class Cut(Base):
    """Needs a whole reply."""
    async def talk(self, client, data):
        messages = [{"role": "user", "content": data["prompt"]}]
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        raise ValueError(f"not JSON: {answer.choices[0].message.content}")

class FromEnvironment:
    """Makes its own client."""
    async def run(self, data):
        async with AsyncOpenAI() as client:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": data["prompt"]}])
        return 1.0

class Sleeps(Base):
    async def talk(self, client, data):
        await self.ask(client, [{"role": "user", "content": data["prompt"]}])
        await asyncio.sleep(3600)
'''  # noqa: E501


@pytest.fixture(autouse=True)
def module(user_module: Callable[[str, str], str]) -> None:
    user_module("gateway_agents", MODULE)


@pytest.mark.parametrize(
    "settings", [{"agent": "Short"}, {"agent": "FromEnvironment", "mode": "subproc"}]
)
async def test_an_answer_becomes_a_row_of_exactly_the_sampled_tokens(
    world: WorkflowWorld, settings: dict[str, str]
) -> None:
    await world.start(f"gateway_agents.{settings.pop('agent')}", subproc_max_workers=1, **settings)
    played = await world.play(group_size=2)
    assert {one.outcome for one in played.values()} == {Outcome.OK}
    rows = [row for one in played.values() for row in one.rows]
    assert [trained(row) for row in rows] == world.sampled()
    assert [row.reward for row in rows] == [1.0, 1.0]
    assert [one.reward for one in played.values()] == [1.0, 1.0]
    await _until_no_session(world)


async def _until_no_session(world: WorkflowWorld) -> None:
    async with asyncio.timeout(60):
        while keys := await world.session_keys():
            assert keys
            await asyncio.sleep(0.02)


async def test_rewards_by_completion_are_discounted_along_the_conversation(
    world: WorkflowWorld,
) -> None:
    await world.start("gateway_agents.Twice", turn_discount=0.5, export_style="individual")
    (played,) = (await world.play()).values()
    assert [row.reward for row in played.rows] == [1.25, 0.5]
    assert played.reward == 1.5
    assert [trained(row) for row in played.rows] == world.sampled()


async def test_a_conversation_is_one_row_unless_the_experiment_says_otherwise(
    world: WorkflowWorld,
) -> None:
    await world.start("gateway_agents.Twice")
    (played,) = (await world.play()).values()
    (row,) = played.rows
    assert trained(row) == [token for call in world.sampled() for token in call]
    assert as_float32(row.turn_rewards).tolist() == [1.0, 0.5]
    assert row.first_turn == -1


async def test_with_granularity_step_every_call_is_a_row_in_one_line_of_turns(
    world: WorkflowWorld,
) -> None:
    world.agents.run_settings["granularity"] = "step"
    await world.start("gateway_agents.Twice")
    (played,) = (await world.play()).values()
    assert [row.first_turn for row in played.rows] == [0, 1]
    assert [trained(row) for row in played.rows] == world.sampled()
    assert [as_float32(row.turn_rewards).tolist() for row in played.rows] == [[1.0], [0.5]]
    assert [row.reward for row in played.rows] == [1.5, 0.5]
    names = [as_int64(row.turn_hashes).tolist() for row in played.rows]
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("Invents", "chatcmpl-of-somebody-else"),
        ("Mute", "without a model call that the gateway answered"),
        ("Raises", "KeyError: 'answer'"),
    ],
)
async def test_a_broken_agent_ends_its_episode_with_a_reason_and_leaves_no_session(
    world: WorkflowWorld, agent: str, reason: str
) -> None:
    await world.start(f"gateway_agents.{agent}")
    await world.admit()
    (settled,) = (await world.agents.settled(1)).values()
    assert settled.outcome is Outcome.INFRA_FAILURE
    assert reason in settled.reason
    await _until_no_session(world)


async def test_an_agent_that_uses_up_its_budget_has_failed_as_a_policy(world: WorkflowWorld) -> None:
    await world.gateway.start_gateway()
    settings = world.settings("gateway_agents.Endless")
    await world.agents.start_agents(**settings, generating_args={"max_new_tokens": 60})
    (played,) = (await world.play()).values()
    assert played.outcome is Outcome.POLICY_FAILURE
    assert played.reward == 0.0
    assert played.metrics[OVER_BUDGET] == 1.0
    assert sum(len(trained(row)) for row in played.rows) == 60


@pytest.mark.parametrize(
    ("scope", "style", "rewards"),
    [
        (None, "individual", [0.5, 0.25, 0.5, 1.0, 1.0]),
        ("conversation", "individual", [0.5, 1.0, 1.0]),
        ("last", "individual", [0.25, 0.0, 1.0]),
        ("episode", "concat", [0.5, 0.25, 1.0]),
    ],
)
async def test_one_number_reaches_the_calls_of_its_scope(
    world: WorkflowWorld,
    capsys: pytest.CaptureFixture[str],
    scope: str | None,
    style: str,
    rewards: list[float],
) -> None:
    chosen = {} if scope is None else {"reward_scope": scope}
    await world.start("gateway_agents.Team", turn_discount=0.5, export_style=style, **chosen)
    (played,) = (await world.play()).values()
    assert played.reward == 1.0
    assert played.success == 1.0
    assert [row.reward for row in played.rows if row.has_reward] == rewards
    is_warned = "rows without a reward are not trained" in "".join(capsys.readouterr())
    assert is_warned == (len(rewards) < len(played.rows))
    assert sum(len(trained(row)) for row in played.rows) == sum(map(len, world.sampled()))


@pytest.mark.parametrize(
    ("agent", "why", "is_over"),
    [
        ("Hides", "token_budget_exceeded", True),
        ("Swallows", "token_budget_exceeded", True),
        ("Cut", "reply_cut", False),
    ],
)
async def test_what_a_framework_hides_of_a_used_up_limit_the_gateway_knows(
    world: WorkflowWorld, agent: str, why: str, is_over: bool
) -> None:
    await world.gateway.start_gateway()
    settings = world.settings(f"gateway_agents.{agent}")
    await world.agents.start_agents(**settings, generating_args={"max_new_tokens": 60})
    (played,) = (await world.play()).values()
    assert played.outcome is Outcome.POLICY_FAILURE
    assert why in played.reason
    assert (played.reward, played.success) == (0.0, 0.0)
    assert played.metrics.get(OVER_BUDGET, 0.0) == float(is_over)
    assert all(row.has_reward and trained(row) for row in played.rows)


async def test_an_agent_that_takes_too_long_is_a_timeout_and_its_call_is_aborted(
    world: WorkflowWorld,
) -> None:
    world.model.hold = True
    await world.start("gateway_agents.Short", timeout_s=8.0)  # its call must begin
    await world.admit()
    (settled,) = (await world.agents.settled(1)).values()
    assert settled.outcome is Outcome.TIMEOUT
    await eventually(lambda: len(world.model.aborted) == 1)
    await _until_no_session(world)


async def test_a_worker_killed_while_it_plays_is_followed_by_a_fresh_session(
    world: WorkflowWorld,
) -> None:
    await world.gateway.start_gateway()
    settings = world.settings("gateway_agents.Short")
    world.model.hold = True
    worker = world.agents.spawn_agents("w0", **settings)
    await world.admit()
    await eventually(lambda: world.model.num_held == 1, 100)
    worker.kill()
    await eventually(lambda: len(world.model.aborted) == 1, 100)
    world.model.hold = False
    await world.agents.start_agents("w1", **settings)
    (played,) = (await world.agents.trajectories(1)).values()
    assert played.outcome is Outcome.OK
    assert len(played.rows) == 1
    await _until_no_session(world)


async def test_a_drained_worker_hands_its_episode_on(world: WorkflowWorld) -> None:
    await world.gateway.start_gateway()
    settings = {**world.settings("gateway_agents.Sleeps"), "drain_s": 0.1}
    first = await world.agents.start_agents("w0", **settings)
    await world.admit()
    await eventually(lambda: len(world.model.requests) == 1)
    first.stop("test", 0)
    await world.agents.start_agents("w1", **world.settings("gateway_agents.Short"))
    (played,) = (await world.agents.trajectories(1)).values()
    assert played.outcome is Outcome.OK
    assert [trained(row) for row in played.rows] == world.sampled()[1:]


async def test_a_worker_that_lost_its_episode_unawares_leaves_it_to_the_next(
    world: WorkflowWorld,
) -> None:
    await world.gateway.start_gateway()
    settings = world.settings("gateway_agents.Twice")
    world.model.hold = True
    worker = world.agents.spawn_agents("w0", **settings)
    await world.admit()
    await eventually(lambda: world.model.num_held == 1, 100)
    worker.running.send_signal(signal.SIGSTOP)  # no heartbeat keeps its message
    await world.agents.start_agents("w1", **settings)
    await eventually(lambda: len(world.model.requests) == 2, 100)
    worker.running.send_signal(signal.SIGCONT)
    reports = world.agents.scheduler.reports
    await eventually(lambda: any(one.worker_id == "w0" and one.released for one in reports), 100)
    world.model.release()
    (settled,) = (await world.agents.settled(1)).values()
    assert (settled.outcome, settled.reward) == (Outcome.OK, 1.5)
    (played,) = (await world.agents.trajectories(1)).values()
    (row,) = played.rows
    last = world.sampled()[-2:]  # on a slow machine the message may have come back to either once more
    assert trained(row) == [token for call in last for token in call]
