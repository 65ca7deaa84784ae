"""litellm, with a loop over tool calls of its own."""

import json
from typing import Any

import litellm
from task import SCHEMA, SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": data["prompt"]},
        ]
        while True:
            completion: Any = await litellm.acompletion(
                model="openai/policy",
                api_base=base_url,
                api_key=api_key,
                messages=messages,
                tools=[{"type": "function", "function": SCHEMA}],
                stream=data["stream"],
            )
            if data["stream"]:
                completion = litellm.stream_chunk_builder([chunk async for chunk in completion])
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return reward(message.content)
            for call in message.tool_calls:
                result = double(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
