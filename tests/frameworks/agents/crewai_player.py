"""CrewAI: one agent, one task."""

from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from task import double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = LLM(model="openai/policy", base_url=base_url, api_key=api_key, stream=data["stream"])
        clerk = Agent(
            role="clerk",
            goal="Answer in digits.",
            backstory="A clerk.",
            llm=model,
            tools=[tool("double")(double)],
        )
        task = Task(description=data["prompt"], expected_output="A number.", agent=clerk)
        return reward(await Crew(agents=[clerk], tasks=[task]).kickoff_async())
