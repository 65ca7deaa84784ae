"""Semantic Kernel's chat agent."""

from typing import Any

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from task import SYSTEM, double, reward


class Tools:
    """The tools of the agent."""

    @kernel_function(name="double", description="Twice a number.")
    def double(self, number: int) -> int:
        return double(number)


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        agent = ChatCompletionAgent(
            service=OpenAIChatCompletion(ai_model_id="policy", async_client=client),
            name="clerk",
            instructions=SYSTEM,
            plugins=[Tools()],
        )
        if not data["stream"]:
            return reward(await agent.get_response(messages=data["prompt"]))
        answer = [str(part) async for part in agent.invoke_stream(messages=data["prompt"])]
        return reward("".join(answer))
