"""LangChain's agent on its own OpenAI model."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, streaming=data["stream"])
        agent = create_agent(model, [tool(double)], system_prompt=SYSTEM)
        final = await agent.ainvoke({"messages": [("user", data["prompt"])]})
        return reward(final["messages"][-1].text)
