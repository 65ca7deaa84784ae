"""An agent on the OpenAI Agents SDK, with a tool. Its reward: share of digits in its last answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from tailrace import PolicyFailureError


@function_tool
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: What to double.
    """
    return 2 * number


class Clerk:
    """Plays one row: may call `double`, then answers."""

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> float:
        """The share of digits in the last answer."""
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        clerk = Agent(
            name="clerk",
            instructions="Answer in digits.",
            tools=[double],
            model=OpenAIChatCompletionsModel("policy", openai_client=client),
            model_settings=ModelSettings(max_tokens=64),
        )
        try:
            result = await Runner.run(
                clerk, data["prompt"], max_turns=4, run_config=RunConfig(tracing_disabled=True)
            )
        except MaxTurnsExceeded as error:
            raise PolicyFailureError(str(error)) from error
        answer = str(result.final_output)
        return sum(char.isdigit() for char in answer) / max(len(answer), 1)


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The data set: eight prompts."""
    for number in range(8):
        yield {"prompt": f"Twice {number}?"}
