"""Haystack's agent."""

from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = OpenAIChatGenerator(
            api_key=Secret.from_token(api_key), model="policy", api_base_url=base_url
        )
        agent = Agent(
            chat_generator=model,
            system_prompt=SYSTEM,
            tools=[create_tool_from_function(double)],
            streaming_callback=print_streaming_chunk if data["stream"] else None,
        )
        return reward(agent.run([ChatMessage.from_user(data["prompt"])])["last_message"].text)
