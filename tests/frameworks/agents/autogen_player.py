"""AutoGen's assistant."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = OpenAIChatCompletionClient(
            model="policy",
            base_url=base_url,
            api_key=api_key,
            model_info={
                "vision": False,
                "function_calling": True,
                "json_output": True,
                "family": "unknown",
                "structured_output": True,
            },
        )
        agent = AssistantAgent(
            "clerk",
            client,
            system_message=SYSTEM,
            tools=[double],
            max_tool_iterations=4,
            model_client_stream=data["stream"],
        )
        result = await agent.run(task=data["prompt"])
        return reward(result.messages[-1].to_text())
