"""An agent outside of the cluster: it leases sums, answers them with its calculator and sends rewards.

    pip install openai
    TAILRACE_GATEWAY_ADMIN_KEY=... python agent.py http://127.0.0.1:8017/v1 --slots 64

Stop it, kill it and start it again at any time. Each slot leases under its own name: after a restart it
gets the episode again that it had, and plays it from the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import os
import re
from typing import Any

import openai

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_TURNS = 4


def calculate(arguments: str) -> str:
    """Result of a call of the calculator, which knows expressions such as `37*46`."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "Error: no expression"
    found = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    return str(SIGNS[found[2]](int(found[1]), int(found[3]))) if found else "Error: no sum"


async def play(client: openai.AsyncOpenAI, task: dict[str, Any]) -> float:
    """Plays one episode; returns 1 if the last reply is the answer."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == task["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculate(call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


async def slot(admin: openai.AsyncOpenAI, name: str) -> None:
    """Plays one episode after the other, until the run ends."""
    while True:
        lease = {"agent": name, "wait_s": 20}
        leased: Any = await admin.post("/episodes", body=lease, cast_to=object)
        if not leased:  # nothing to play at present
            continue
        client = admin.with_options(base_url=leased["base_url"], api_key=leased["api_key"])
        try:
            reward = await play(client, leased["task"])
            end: dict[str, Any] = {"reward": reward, "metrics": {"success": reward}}
        except openai.BadRequestError as error:  # the tokens of the episode are used up
            end = {"outcome": "policy_failure", "reward": 0.0, "reason": str(error)}
        except openai.APIStatusError as error:  # another agent has the episode, or its time is over
            print(f"{leased['episode_id']}: {error}")
            continue
        try:
            await client.post("/episodes/current/reward", body=end, cast_to=object)
        except openai.APIStatusError as error:
            print(f"{leased['episode_id']}: {error}")


async def wait_for_run(admin: openai.AsyncOpenAI) -> None:
    """Waits until the gateway answers; a run may begin with minutes of preparation."""
    while True:
        try:
            await admin.models.list()
            return
        except openai.APIConnectionError:
            await asyncio.sleep(1)


async def main() -> None:
    """Plays in many slots at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the gateway's address, ending with /v1")
    parser.add_argument(
        "--name", default="agent-0", help="name of this agent, the same after a restart"
    )
    parser.add_argument("--slots", type=int, default=64, help="episodes at once")
    args = parser.parse_args()
    key = os.environ.get("TAILRACE_GATEWAY_ADMIN_KEY", "")
    if not key:
        parser.error("set TAILRACE_GATEWAY_ADMIN_KEY to the key with which the run was started")
    # Retries bridge restarts of the gateway; about a minute of silence is the end of the run.
    admin = openai.AsyncOpenAI(base_url=args.url, api_key=key, max_retries=10)
    await wait_for_run(admin)
    slots = (slot(admin, f"{args.name}/{number}") for number in range(args.slots))
    try:
        await asyncio.gather(*slots)
    except openai.APIConnectionError:
        print("the gateway is gone: the run is over")


if __name__ == "__main__":
    asyncio.run(main())
