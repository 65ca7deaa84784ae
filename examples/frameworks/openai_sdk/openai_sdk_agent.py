"""An agent on the OpenAI SDK. It asks twice in one conversation; its rewards are shares of digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI


class DigitAgent:
    """Plays one row: asks for a number, then for another one."""

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> dict[str, float]:
        """Returns the reward of each answer, by its completion id."""
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        rewards = {}
        for question in ("Another one.", None):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, max_completion_tokens=8
            )
            answer = completion.choices[0].message.content or ""
            rewards[completion.id] = digit_share(answer)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": question},
            ]
        return rewards


def digit_share(answer: str) -> float:
    """The share of digits among the characters of an answer."""
    return sum(char.isdigit() for char in answer) / max(len(answer), 1)


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The data set: eight prompts."""
    for number in range(8):
        yield {"prompt": f"A number near {number}0, please."}
