"""A CAMEL agent with a tool. Its process runs in a separate virtual environment with CAMEL.

Its reward is the share of digits in its last answer.
"""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: What to double.
    """
    return 2 * number


class CharacterCounter(BaseTokenCounter):
    """One token per character: CAMEL's own counter would load OpenAI's vocabulary from the Internet."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        """Counts the characters of all contents."""
        return sum(len(str(message.get("content") or "")) for message in messages)

    def encode(self, text: str) -> list[int]:
        """Code points."""
        return [ord(char) for char in text]

    def decode(self, token_ids: list[int]) -> str:
        """The text of code points."""
        return "".join(map(chr, token_ids))


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
            token_counter=CharacterCounter(),
        )
        clerk = ChatAgent("Answer in digits.", model=model, tools=[FunctionTool(double)])
        response = clerk.step(data["prompt"])  # blocks: mode subproc
        answer = response.msgs[0].content if response.msgs else ""
        return sum(char.isdigit() for char in answer) / max(len(answer), 1)
