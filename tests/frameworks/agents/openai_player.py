"""The OpenAI SDK, with a loop over tool calls of its own; streamed if the row says so."""

import json
from typing import Any

from openai import AsyncOpenAI
from task import SCHEMA, SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": data["prompt"]},
        ]
        while True:
            settings: Any = {
                "model": "policy",
                "messages": messages,
                "tools": [{"type": "function", "function": SCHEMA}],
            }
            if data["stream"]:
                async with client.chat.completions.stream(**settings) as stream:
                    completion = await stream.get_final_completion()
            else:
                completion = await client.chat.completions.create(**settings)
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return reward(message.content)
            for call in message.tool_calls:
                result = double(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
