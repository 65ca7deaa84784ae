"""smolagents' agent that calls tools; its answer is a call of its tool `final_answer`."""

from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from task import double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
        agent = ToolCallingAgent(
            tools=[tool(double)], model=model, stream_outputs=data["stream"], verbosity_level=0
        )
        return reward(agent.run(data["prompt"], max_steps=4))
