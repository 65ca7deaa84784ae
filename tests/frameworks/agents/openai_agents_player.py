"""The OpenAI Agents SDK."""

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        agent = Agent(
            name="clerk",
            instructions=SYSTEM,
            tools=[function_tool(double)],
            model=OpenAIChatCompletionsModel("policy", openai_client=client),
        )
        config = RunConfig(tracing_disabled=True)
        if data["stream"]:
            result = Runner.run_streamed(agent, data["prompt"], run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, data["prompt"], run_config=config)
        return reward(result.final_output)
