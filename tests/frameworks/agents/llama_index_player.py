"""LlamaIndex's function agent."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = OpenAILike(
            model="policy",
            api_base=base_url,
            api_key=api_key,
            is_chat_model=True,
            is_function_calling_model=True,
        )
        agent = FunctionAgent(
            tools=[FunctionTool.from_defaults(double)],
            llm=model,
            system_prompt=SYSTEM,
            streaming=data["stream"],
        )
        return reward(await agent.run(data["prompt"]))
