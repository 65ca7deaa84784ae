"""The Vercel AI SDK, in a process of Node that gets the address and the key by its environment."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from task import reward

SCRIPT = Path(__file__).parents[1] / "vercel_ai" / "player.mjs"


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        stream = str(data["stream"]).lower()
        node = await asyncio.create_subprocess_exec("node", SCRIPT, data["prompt"], stream, stdout=PIPE)
        answer, _ = await node.communicate()
        return reward(answer.decode())
