"""CAMEL's chat agent."""

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel_agent import CharacterCounter
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="policy",
            url=base_url,
            api_key=api_key,
            model_config_dict={"stream": data["stream"]},
            token_counter=CharacterCounter(),
        )
        agent = ChatAgent(SYSTEM, model=model, tools=[FunctionTool(double)])
        response = await agent.astep(data["prompt"])
        if data["stream"]:
            async for part in response:
                last = part
            response = last
        return reward(response.msgs[0].content)
