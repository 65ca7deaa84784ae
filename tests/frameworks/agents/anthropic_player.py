"""The Anthropic SDK, with a loop over tool uses of its own; thoughts go back as they came."""

from typing import Any

from anthropic import AsyncAnthropic
from task import SCHEMA, SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        tool: Any = {
            "name": "double",
            "description": SCHEMA["description"],
            "input_schema": SCHEMA["parameters"],
        }
        while True:
            settings: Any = {
                "model": "policy",
                "max_tokens": 2048,
                "system": SYSTEM,
                "tools": [tool],
                "messages": messages,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            if data["stream"]:
                async with client.messages.stream(**settings) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**settings)
            messages.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return reward("".join(block.text for block in message.content if block.type == "text"))
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": str(double(**use.input))}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})
