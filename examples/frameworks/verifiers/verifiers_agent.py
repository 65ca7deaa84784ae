"""Any environment of verifiers as a workflow: it may offer tools and rewrite messages.

The process of this agent runs in a separate virtual environment with verifiers.
"""

from __future__ import annotations

from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


class Player:
    """Plays rows of an environment: `env_id`, `env_args` as `verifiers.load_environment` takes them."""

    def __init__(self, env_id: str, env_args: dict[str, Any] | None = None) -> None:
        self.env = verifiers.load_environment(env_id, **(env_args or {}))

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        """Returns the score of the environment's rubric. An error of the rollout ends the episode."""
        split = self.env.get_dataset() if data["split"] == "train" else self.env.get_eval_dataset()
        row = split[data["row"] % len(split)]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            client = OpenAIChatCompletionsClient(openai)
            state = await self.env.rollout(row, client, "policy", {"max_tokens": 128})
        if state.get("error"):
            raise state["error"]
        await self.env.rubric.score_rollout(state)
        return float(state["reward"])
