"""instructor: a typed answer by a forced tool call, asked again when it does not fit."""

from typing import Any

import instructor
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from task import SYSTEM, reward


class Answer(BaseModel):
    """The answer."""

    number: int = Field(ge=80)


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = instructor.from_openai(AsyncOpenAI(base_url=base_url, api_key=api_key))
        answer = await client.chat.completions.create(
            model="policy",
            response_model=Answer,
            max_retries=3,
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": data["prompt"]},
            ],
        )
        return reward(answer.number)
