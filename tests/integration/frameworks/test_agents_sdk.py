"""OpenAI's Agents SDK as it is by default: model, settings and API of its own."""

from __future__ import annotations

import agents
import pytest

from tests.world.byte_model import call_text
from tests.world.workflows import WorkflowWorld


@agents.function_tool
def double(number: int) -> str:
    """Doubles."""
    return str(2 * number)


def say(prompt: str, _: object) -> str:
    if "<tool_response>42" in prompt:
        return "<think>Hm.</think>It is 42."
    return "<think>Hm.</think>Let me see." + call_text("double", number=21)


@pytest.mark.parametrize("use_responses", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_agent_without_a_model_of_its_own_plays(
    world: WorkflowWorld, use_responses: bool, streams: bool
) -> None:
    world.model.reply = say
    gateway = world.gateway
    await gateway.start_gateway()
    client = gateway.openai(await gateway.open())
    provider = agents.OpenAIProvider(openai_client=client, use_responses=use_responses)
    config = agents.RunConfig(tracing_disabled=True, model_provider=provider)
    agent = agents.Agent(name="clerk", instructions="Be brief.", tools=[double])
    if streams:
        streamed = agents.Runner.run_streamed(agent, "Double 21.", run_config=config)
        _ = [event async for event in streamed.stream_events()]
        answer = streamed.final_output
    else:
        answer = (await agents.Runner.run(agent, "Double 21.", run_config=config)).final_output
    assert answer == "It is 42."
    metrics = (await gateway.export()).metrics
    assert (metrics["num_calls"], metrics["num_forks"]) == (2, 0)
