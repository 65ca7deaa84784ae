"""pydantic-ai on its Anthropic model, with thoughts."""

from typing import Any

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai_player import play
from task import SYSTEM, double


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        settings = AnthropicModelSettings(max_tokens=2048, anthropic_thinking=thinking)
        agent = Agent(model, system_prompt=SYSTEM, tools=[double], model_settings=settings)
        return await play(agent, data)
