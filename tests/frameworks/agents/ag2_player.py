"""AG2's agent."""

from typing import Any

from ag2 import Agent
from ag2.config import OpenAIConfig
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        config = OpenAIConfig("policy", base_url=base_url, api_key=api_key, streaming=data["stream"])
        reply = await Agent("clerk", SYSTEM, config=config, tools=[double]).ask(data["prompt"])
        return reward(reply.body)
