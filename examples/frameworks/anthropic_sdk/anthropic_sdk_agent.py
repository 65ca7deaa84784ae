"""An agent on the Anthropic SDK. It streams one message; its reward is the share of digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anthropic import AsyncAnthropic


class DigitAgent:
    """Plays one row: asks for a number."""

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> dict[str, float]:
        """Returns the reward of the message, by its id."""
        client = AsyncAnthropic(  # appends /v1 to its base URL
            base_url=base_url.removesuffix("/v1"), api_key=api_key, http_client=http_client
        )
        async with client.messages.stream(
            model="policy",
            max_tokens=8,
            system="Answer in digits.",
            messages=[{"role": "user", "content": data["prompt"]}],
        ) as stream:
            message = await stream.get_final_message()
        answer = "".join(block.text for block in message.content if block.type == "text")
        return {message.id: sum(char.isdigit() for char in answer) / max(len(answer), 1)}


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The data set: eight prompts."""
    for number in range(8):
        yield {"prompt": f"A number near {number}0, please."}
