"""The Vercel AI SDK with its provider of OpenAI, which calls `/v1/responses`."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from task import reward

SCRIPT = Path(__file__).parents[1] / "vercel_ai" / "player.mjs"


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        arguments = data["prompt"], str(data["stream"]).lower(), "responses"
        node = await asyncio.create_subprocess_exec("node", SCRIPT, *arguments, stdout=PIPE)
        answer, _ = await node.communicate()
        return reward(answer.decode())
