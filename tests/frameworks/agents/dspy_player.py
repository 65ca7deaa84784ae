"""DSPy's ReAct: tools by text, each turn a prompt of its own."""

from typing import Any

import dspy
from task import double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = dspy.LM("openai/policy", api_base=base_url, api_key=api_key, cache=False)
        react = dspy.ReAct("question -> answer", [double], max_iters=4)
        with dspy.context(lm=model, adapter=dspy.ChatAdapter()):
            if not data["stream"]:
                return reward((await react.acall(question=data["prompt"])).answer)
            told = [each async for each in dspy.streamify(react)(question=data["prompt"])]
            return reward(told[-1].answer)  # chunks came before it
