"""pydantic-ai on its OpenAI model."""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
        return await play(Agent(model, system_prompt=SYSTEM, tools=[double]), data)


async def play(agent: Any, data: dict[str, Any]) -> float:
    """Run an agent, streamed if the row says so."""
    if not data["stream"]:
        return reward((await agent.run(data["prompt"])).output)
    async with agent.iter(data["prompt"]) as run:
        async for node in run:
            if agent.is_model_request_node(node):
                async with node.stream(run.ctx) as stream:
                    async for _ in stream:
                        pass
        return reward(run.result.output)
