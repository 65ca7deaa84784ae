"""Strands' agent."""

from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        access = {"base_url": base_url, "api_key": api_key}
        model = OpenAIModel(client_args=access, model_id="policy", stream=data["stream"])
        agent = Agent(model, system_prompt=SYSTEM, tools=[tool(double)], callback_handler=None)
        return reward(await agent.invoke_async(data["prompt"]))
