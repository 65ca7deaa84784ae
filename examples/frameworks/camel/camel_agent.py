"""A CAMEL agent with a tool. CAMEL is in an environment of its own, and so is this agent's process.

It is paid for digits in its last answer.
"""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: What to double.
    """
    return 2 * number


class Clerk:
    """Plays one row: may call `double`, then answers."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        """The share of digits in the last answer."""
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="policy",
            url=base_url,
            api_key=api_key,
            model_config_dict={"max_tokens": 64},
        )
        clerk = ChatAgent("Answer in digits.", model=model, tools=[FunctionTool(double)])
        response = clerk.step(data["prompt"])  # blocks: mode subproc
        answer = response.msgs[0].content if response.msgs else ""
        return sum(char.isdigit() for char in answer) / max(len(answer), 1)
